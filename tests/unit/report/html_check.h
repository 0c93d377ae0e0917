// Whether a page is well-formed HTML that loads nothing: what our own pages use of HTML, held to stricter rules than browsers'.
#pragma once

#include <string>
#include <vector>

namespace spipe::report {

// One line for every problem: tags that are not balanced or not nested, attributes without quotes or given twice, ids given
// twice, bare & and <, elements that may not be there (p in p, a row outside of a table), addresses and scripts.
[[nodiscard]] std::vector<std::string> html_problems(const std::string& page);

}  // namespace spipe::report
