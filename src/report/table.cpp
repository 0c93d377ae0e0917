// Plain-text tables for start-up output.
#include <algorithm>
#include <string_view>

#include "spipe/report/report.h"

namespace spipe::report {
namespace {

constexpr std::string_view kGap = "  ";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Starts with a number ("12.4 k", "-0.5", "+3 %", ".5") or stands for one that is missing ("-", "n/a").
bool looks_like_number(const std::string& cell) {
  if (cell == "-" || cell == "n/a") {
    return true;
  }
  std::size_t at = 0;
  while (at < cell.size() && (cell[at] == '-' || cell[at] == '+' || cell[at] == '.')) {
    ++at;
  }
  return at <= 2 && at < cell.size() && is_digit(cell[at]);
}

// Characters as a terminal counts them: UTF-8 continuation bytes take no column.
std::size_t display_width(const std::string& cell) {
  return static_cast<std::size_t>(std::count_if(cell.begin(), cell.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

struct Column {
  std::size_t width = 0;
  bool right = false;
};

std::vector<Column> measure(const std::vector<std::vector<std::string>>& rows) {
  std::vector<Column> columns;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      if (c == columns.size()) {
        columns.push_back({});
      }
      columns[c].width = std::max(columns[c].width, display_width(rows[r][c]));
    }
  }
  // Right-aligned: below the heading there is something, and all of it looks like numbers (blank cells do not matter).
  for (std::size_t c = 0; c < columns.size(); ++c) {
    std::size_t numbers = 0, others = 0;
    for (std::size_t r = 1; r < rows.size(); ++r) {
      if (c < rows[r].size() && !rows[r][c].empty()) {
        ++(looks_like_number(rows[r][c]) ? numbers : others);
      }
    }
    columns[c].right = numbers > 0 && others == 0;
  }
  return columns;
}

}  // namespace

std::string table(const std::vector<std::vector<std::string>>& rows) {
  const std::vector<Column> columns = measure(rows);
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(columns[c].width - display_width(row[c]), ' ');
      line += (c == 0 ? std::string() : std::string(kGap)) + (columns[c].right ? padding + row[c] : row[c] + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace spipe::report
