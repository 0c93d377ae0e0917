#include "page_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <sstream>

#include "spipe/base/units.h"

namespace spipe::report {
namespace {

using plan::html_escaped;

std::string of_run(const ReportedRun& run, std::size_t at, std::size_t runs) {
  if (runs == 1) return {};
  return fmt::format("<h3><span class=\"key\" style=\"background:{}\"></span>{}</h3>\n", run_colour(at),
                     html_escaped(run.name));
}

std::string state_of(const ReportedRun& run) {
  if (!run.facts) return {};
  if (!run.facts->end) return "no end recorded";
  return run.facts->end->how == "saved" ? "stopped and saved" : run.facts->end->how;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<std::string> overview_row(const ReportedRun& run) {
  std::optional<double> loss, tokens;
  std::optional<std::pair<double, std::uint64_t>> best;
  std::vector<double> speeds;
  std::uint64_t step = 0;
  for (const MetricPoint& point : run.metrics) {
    step = std::max(step, point.step);
    if (point.loss) loss = point.loss;
    if (point.tokens) tokens = point.tokens;
    if (point.eval_loss && (!best || *point.eval_loss < best->first)) best = {*point.eval_loss, point.step};
    if (point.tokens_per_s) speeds.push_back(*point.tokens_per_s);
  }
  std::vector<std::string> row = {run.name, state_of(run)};
  row.push_back(run.facts ? fmt::format("{} of {}", step, run.facts->total_steps) : fmt::format("{}", step));
  row.push_back(tokens ? format_count(*tokens) : "");
  row.push_back(loss ? fmt::format("{:.4f}", *loss) : "");
  row.push_back(best ? fmt::format("{:.4f} (step {})", best->first, best->second) : "");
  row.push_back(speeds.empty() ? "" : format_count(median(speeds)));
  row.push_back(run.facts && run.facts->end ? format_duration(run.facts->end->seconds) : "");
  return row;
}

std::uint64_t total_of(const std::vector<MemoryPart>& parts) {
  std::uint64_t total = 0;
  for (const MemoryPart& part : parts) total += part.bytes;
  return total;
}

using Parts = std::vector<MemoryPart> RunFacts::*;

// Names of parts of all runs in the order of their first appearance.
std::vector<std::string> part_names(const std::vector<ReportedRun>& runs, Parts parts) {
  std::vector<std::string> names;
  for (const ReportedRun& run : runs) {
    if (!run.facts) continue;
    for (const MemoryPart& part : (*run.facts).*parts) {
      if (std::find(names.begin(), names.end(), part.name) == names.end()) names.push_back(part.name);
    }
  }
  return names;
}

const char* part_colour(std::size_t at) {
  constexpr const char* colours[] = {"#2f7fc1", "#9cc9ea", "#2e9e5b", "#a8d8b9", "#e08a2e", "#f3c896",
                                     "#7b3fa0", "#c9a6dc", "#c2304e", "#e58aa0", "#4d5a63", "#b8c0c6"};
  return colours[at % std::size(colours)];
}

// One stacked bar, on a scale that all runs share.
std::string bar(const ReportedRun& run, Parts parts, const std::vector<std::string>& names, std::uint64_t scale) {
  std::string text = fmt::format("<svg class=\"bar\" role=\"img\" aria-label=\"memory of {}\">", html_escaped(run.name));
  double x = 0;
  for (const MemoryPart& part : (*run.facts).*parts) {
    const auto at = static_cast<std::size_t>(std::find(names.begin(), names.end(), part.name) - names.begin());
    const double width = 100 * static_cast<double>(part.bytes) / static_cast<double>(std::max<std::uint64_t>(1, scale));
    fmt::format_to(std::back_inserter(text),
                   "<rect x=\"{:.3f}%\" width=\"{:.3f}%\" height=\"100%\" fill=\"{}\"><title>{}: {}</title></rect>", x, width,
                   part_colour(at), html_escaped(part.name), format_bytes(part.bytes));
    x += width;
  }
  return text + "</svg>\n";
}

std::string memory_of(const std::vector<ReportedRun>& runs, const char* title, Parts parts, std::uint64_t RunFacts::*limit) {
  const std::vector<std::string> names = part_names(runs, parts);
  if (names.empty()) return {};
  std::uint64_t scale = 0;
  for (const ReportedRun& run : runs) {
    if (run.facts) scale = std::max(scale, total_of((*run.facts).*parts));
  }
  std::string bars, head = fmt::format("<tr><th>{}</th>", title);
  std::vector<std::string> rows;
  for (std::size_t i = 0; i < names.size(); ++i) {
    rows.push_back(fmt::format("<tr><td class=\"text\"><span class=\"key\" style=\"background:{}\"></span>{}</td>",
                               part_colour(i), html_escaped(names[i])));
  }
  std::string total = "<tr><td class=\"text\">all</td>", budget = "<tr><td class=\"text\">limit</td>";
  for (const ReportedRun& run : runs) {
    if (!run.facts) continue;
    const std::vector<MemoryPart>& own = (*run.facts).*parts;
    bars += bar(run, parts, names, scale);
    head += fmt::format("<th>{}</th>", runs.size() > 1 ? html_escaped(run.name) : "at the peak");
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto part = std::find_if(own.begin(), own.end(), [&](const MemoryPart& p) { return p.name == names[i]; });
      rows[i] += fmt::format("<td>{}</td>", part == own.end() ? "" : format_bytes(part->bytes));
    }
    const std::uint64_t most = (*run.facts).*limit;
    total += fmt::format("<td>{}</td>", format_bytes(total_of(own)));
    budget += fmt::format("<td>{}</td>", most > 0 ? format_bytes(most) : "none");
  }
  std::string text = bars + "<div class=\"scroll\"><table>\n" + head + "</tr>\n";
  for (const std::string& row : rows) text += row + "</tr>\n";
  return "<div class=\"memory\">\n" + text + total + "</tr>\n" + budget + "</tr>\n</table></div>\n</div>\n";
}

// What resolved_text wrote, as "section.key" and value.
std::map<std::string, std::string> flat_config(const std::string& text) {
  std::map<std::string, std::string> values;
  std::vector<std::string> path;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const std::size_t indent = line.find_first_not_of(' ');
    if (indent == std::string::npos || line[indent] == '#') continue;
    const std::size_t colon = line.find(':', indent);
    if (colon == std::string::npos) continue;
    path.resize(std::min(path.size(), indent / 2));
    path.push_back(line.substr(indent, colon - indent));
    std::string value =
        line.substr(colon + 1, line.rfind(" # ") == std::string::npos ? std::string::npos : line.rfind(" # ") - colon - 1);
    value.erase(0, value.find_first_not_of(' '));
    value.erase(value.find_last_not_of(' ') + 1);
    if (value.empty()) continue;  // a section
    std::string key;
    for (const std::string& part : path) key += (key.empty() ? "" : ".") + part;
    values[key] = value;
  }
  return values;
}

// A row for every name with a cell a run; `only_different`: rows whose cells are all the same are left out.
std::vector<std::vector<std::string>> side_by_side(const std::vector<ReportedRun>& runs, const char* heading,
                                                   bool only_different,
                                                   const std::function<TextRows(const ReportedRun&)>& rows_of) {
  std::vector<std::string> names;
  std::vector<std::map<std::string, std::string>> values;
  for (const ReportedRun& run : runs) {
    values.emplace_back();
    for (const auto& [name, text] : rows_of(run)) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      values.back()[name] = text;
    }
  }
  std::vector<std::vector<std::string>> table = {{heading}};
  for (const ReportedRun& run : runs) table.front().push_back(runs.size() > 1 ? run.name : "");
  for (const std::string& name : names) {
    std::vector<std::string> row = {name};
    for (auto& run : values) row.push_back(run[name]);
    const bool same = std::all_of(row.begin() + 2, row.end(), [&](const std::string& cell) { return cell == row[1]; });
    if (!only_different || !same) table.push_back(std::move(row));
  }
  return table;
}

std::string text_table(const std::vector<std::vector<std::string>>& rows) {
  std::string text = "<div class=\"scroll\"><table class=\"words\">\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (r == 0 && std::all_of(rows[0].begin(), rows[0].end(), [](const std::string& cell) { return cell.empty(); })) continue;
    text += "<tr>";
    for (const std::string& cell : rows[r]) text += fmt::format("<{0}>{1}</{0}>", r == 0 ? "th" : "td", html_escaped(cell));
    text += "</tr>\n";
  }
  return text + "</table></div>\n";
}

}  // namespace

std::string html_table(const std::vector<std::vector<std::string>>& rows) {
  std::string text = "<div class=\"scroll\"><table>\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    text += "<tr>";
    for (const std::string& cell : rows[r]) {
      text += fmt::format("<{0}>{1}</{0}>", r == 0 ? "th" : "td", html_escaped(cell));
    }
    text += "</tr>\n";
  }
  return text + "</table></div>\n";
}

std::string overview_table(const std::vector<ReportedRun>& runs) {
  const std::vector<std::string> heading = {"run",       "state",         "steps",    "tokens",
                                            "last loss", "best held out", "tokens/s", "time"};
  std::vector<std::vector<std::string>> rows = {heading};
  for (const ReportedRun& run : runs) rows.push_back(overview_row(run));
  std::vector<std::vector<std::string>> kept(rows.size());  // without columns that no run fills
  for (std::size_t c = 0; c < heading.size(); ++c) {
    if (std::all_of(rows.begin() + 1, rows.end(), [c](const auto& row) { return row[c].empty(); })) continue;
    for (std::size_t r = 0; r < rows.size(); ++r) kept[r].push_back(rows[r][c]);
  }
  std::string text = "<div class=\"scroll\"><table>\n";
  for (std::size_t r = 0; r < kept.size(); ++r) {
    text += "<tr>";
    for (std::size_t c = 0; c < kept[r].size(); ++c) {
      const std::string key = r > 0 && c == 0
                                  ? fmt::format("<span class=\"key\" style=\"background:{}\"></span>", run_colour(r - 1))
                                  : std::string();
      text += fmt::format("<{0}{3}>{1}{2}</{0}>", r == 0 ? "th" : "td", key, html_escaped(kept[r][c]),
                          r > 0 && c == 0 ? " class=\"text\"" : "");
    }
    text += "</tr>\n";
  }
  text += "</table></div>\n";
  for (const ReportedRun& run : runs) {
    if (!run.facts || !run.facts->end || run.facts->end->text.empty()) continue;
    text += fmt::format("<p class=\"note\">{}: {}</p>\n", html_escaped(run.name), html_escaped(run.facts->end->text));
  }
  return text;
}

std::string memory_section(const std::vector<ReportedRun>& runs) {
  const std::string device = memory_of(runs, "device", &RunFacts::device, &RunFacts::device_limit);
  const std::string host = memory_of(runs, "host", &RunFacts::host, &RunFacts::host_limit);
  if (device.empty() && host.empty()) return {};
  return "<h2>Memory</h2>\n<div class=\"sides\">\n" + device + host + "</div>\n";
}

std::string samples_section(const std::vector<ReportedRun>& runs) {
  constexpr std::size_t most_shown = 6;  // of a run
  std::string text;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const std::vector<SampleText>& samples = runs[r].samples;
    if (samples.empty()) continue;
    text += of_run(runs[r], r, runs.size());
    std::size_t shown = 0;
    for (auto sample = samples.rbegin(); sample != samples.rend() && shown < most_shown; ++sample, ++shown) {
      text += fmt::format("<pre class=\"sample\"><span>step {}</span>\n<b>{}</b>{}</pre>\n", sample->step,
                          html_escaped(sample->prompt), html_escaped(sample->text));
    }
  }
  return text.empty() ? text : "<h2>Samples</h2>\n" + text;
}

std::string config_section(const std::vector<ReportedRun>& runs) {
  std::string text;
  if (runs.size() > 1) {
    const auto rows = side_by_side(runs, "key", true, [](const ReportedRun& run) {
      TextRows keys;
      for (const auto& [key, value] : flat_config(run.config)) keys.emplace_back(key, value);
      return keys;
    });
    text += rows.size() > 1 ? "<p>What differs:</p>\n" + text_table(rows) : "<p>Nothing differs.</p>\n";
  }
  bool any = false;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    if (runs[r].config.empty()) continue;
    any = true;
    text += of_run(runs[r], r, runs.size()) + fmt::format("<pre class=\"config\">{}</pre>\n", html_escaped(runs[r].config));
  }
  return any ? "<h2>Configuration</h2>\n" + text : std::string();
}

std::string environment_section(const std::vector<ReportedRun>& runs) {
  const auto rows_of = [](const ReportedRun& run) {
    TextRows rows;
    if (!run.facts) return rows;
    rows = run.facts->model;
    rows.insert(rows.end(), run.facts->environment.begin(), run.facts->environment.end());
    rows.emplace_back("plan", run.facts->plan);
    rows.emplace_back("started", run.facts->started);
    if (run.facts->end) rows.emplace_back("ended", run.facts->end->at);
    return rows;
  };
  const auto rows = side_by_side(runs, "", false, rows_of);
  return rows.size() > 1 ? "<h2>Model and environment</h2>\n" + text_table(rows) : std::string();
}

}  // namespace spipe::report
