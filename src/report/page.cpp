#include "spipe/report/page.h"

#include <fmt/format.h>

namespace spipe::report {
namespace {

std::string html_table(const std::vector<std::vector<std::string>>& rows) {
  std::string text = "<div class=\"scroll\"><table>\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    text += "<tr>";
    for (const std::string& cell : rows[r]) {
      text += fmt::format("<{0}>{1}</{0}>", r == 0 ? "th" : "td", plan::html_escaped(cell));
    }
    text += "</tr>\n";
  }
  return text + "</table></div>\n";
}

std::string notes(const Trace& trace, std::int64_t step) {
  const std::vector<std::int64_t> steps = whole_steps(trace);
  std::string text = steps.size() == 1 ? fmt::format(
                                             "The trace holds step {} only: what ranks do for the steps around it counts "
                                             "as idle.",
                                             step + 1)
                                       : fmt::format(
                                             "The trace holds steps {} to {}; other steps' tasks are pale, and count as "
                                             "busy.",
                                             steps.front() + 1, steps.back() + 1);
  if (trace.left_out > 0) text += fmt::format(" It was cut: {} tasks that ran later are not in it.", trace.left_out);
  return text + " The bubble is idle compute from the first to the last computation of the step on any rank.";
}

}  // namespace

std::string report_page(const std::string& title, const Trace& trace, std::int64_t step,
                        const std::vector<MetricPoint>& metrics) {
  const StepSummary summary = summarise(trace, step);
  std::string body = fmt::format("<h1>{}</h1>\n", plan::html_escaped(title));
  const std::string curves = metric_curves(metrics);
  if (!curves.empty()) body += fmt::format("<h2>{} steps</h2>\n{}", metrics.back().step, curves);
  body += fmt::format("<h2>Step {}</h2>\n<p>{}</p>\n{}<h2>Busy times and bytes of step {}</h2>\n{}<p class=\"note\">{}</p>\n",
                      step + 1, plan::html_escaped(summary_line(summary)), plan::timeline_figure(trace.slices, step), step + 1,
                      html_table(summary_rows(summary)), notes(trace, step));
  return plan::html_page(title, body);
}

}  // namespace spipe::report
