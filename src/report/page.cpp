#include "spipe/report/page.h"

#include <fmt/format.h>

#include <algorithm>

#include "page_parts.h"

namespace spipe::report {
namespace {

// Beside the timeline's own style. The values at a place of a chart appear when it is pointed at, or touched.
constexpr const char* kStyle =
    ".curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:.5em 1.5em;max-width:1180px}"
    ".curve{width:100%}"
    ".curve .first{font-weight:600}.line{fill:none;stroke-width:1.5}.dot{fill:#fff;stroke-width:1.5}"
    ".p rect{fill:transparent;cursor:pointer}.tip{display:none;pointer-events:none}.tip line{stroke:#999}"
    ".p:hover .tip{display:inline}"
    "h3{font-size:1em;margin:1em 0 .3em}.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em}"
    ".text{text-align:left}.sides{display:flex;flex-wrap:wrap;gap:1em 3em}.memory{flex:1 1 300px;max-width:600px;min-width:0}"
    ".bar{width:100%;height:1.6em;display:block;margin:.3em 0;background:#f4f4f4}"
    "table.words td,table.words th{text-align:left;white-space:normal;vertical-align:top;overflow-wrap:anywhere}"
    "table.words td:first-child{white-space:nowrap}"
    ".config{max-height:26em}.sample{white-space:pre-wrap;overflow-wrap:anywhere;margin:.5em 0}.sample span{color:#777}"
    "@media print{.config{max-height:none;overflow:visible;white-space:pre-wrap}.curve,.memory,.sample{break-inside:avoid}"
    "h2{break-after:avoid}}";

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

std::string step_section(const ReportedRun& run, bool several) {
  const StepSummary summary = summarise(*run.trace, *run.step);
  const std::int64_t number = *run.step + 1;
  const std::string of = several ? " of " + plan::html_escaped(run.name) : std::string();
  return fmt::format(
      "<h2>Step {0}{1}</h2>\n<p>{2}</p>\n{3}<h2>Busy times and bytes of step {0}{1}</h2>\n{4}<p class=\"note\">{5}</p>\n",
      number, of, plan::html_escaped(summary_line(summary)), plan::timeline_figure(run.trace->slices, *run.step),
      html_table(summary_rows(summary)), notes(*run.trace, *run.step));
}

bool has_numbers(const ReportedRun& run) { return !run.metrics.empty() || run.facts.has_value(); }

}  // namespace

std::string report_page(const std::vector<ReportedRun>& runs) {
  std::string title;
  for (const ReportedRun& run : runs) title += (title.empty() ? "" : ", ") + run.name;
  std::string body = fmt::format("<h1>{}</h1>\n", plan::html_escaped(title));
  if (std::any_of(runs.begin(), runs.end(), has_numbers)) body += overview_table(runs);
  const std::string curves = metric_curves(runs);
  if (!curves.empty()) body += "<h2>Curves over steps</h2>\n" + curves;
  body += memory_section(runs);
  const auto traced = std::find_if(runs.begin(), runs.end(), [](const ReportedRun& run) { return run.trace.has_value(); });
  if (traced != runs.end()) body += step_section(*traced, runs.size() > 1);
  body += samples_section(runs) + config_section(runs) + environment_section(runs);
  return plan::html_page(title, body, kStyle);
}

}  // namespace spipe::report
