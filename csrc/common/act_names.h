// The `act` argument of ops: text to a chain.
#pragma once

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "common/activation.h"

namespace kgopt {

// A name of the argument: what it is, how many parameters it may be given, and those that are left out.
struct ActName {
  std::string_view name;
  Act act;
  int least, most;
  double defaults[2];
  const char* parameters;
};

// Parameters are torch.nn.functional's, in its order.
inline constexpr ActName kActNames[] = {
    {"none", Act::kNone, 0, 0, {0, 0}, ""},
    {"relu", Act::kRelu, 0, 0, {0, 0}, ""},
    {"leaky_relu", Act::kLeakyRelu, 0, 1, {0.01, 0}, "negative_slope"},
    {"silu", Act::kSilu, 0, 0, {0, 0}, ""},
    {"gelu", Act::kGelu, 0, 0, {0, 0}, ""},
    {"gelu_tanh", Act::kGeluTanh, 0, 0, {0, 0}, ""},
    {"sigmoid", Act::kSigmoid, 0, 0, {0, 0}, ""},
    {"tanh", Act::kTanh, 0, 0, {0, 0}, ""},
    {"hardswish", Act::kHardswish, 0, 0, {0, 0}, ""},
    {"hardtanh", Act::kHardtanh, 0, 2, {-1, 1}, "min_val, max_val"},
    {"elu", Act::kElu, 0, 1, {1, 1}, "alpha"},
    {"mish", Act::kMish, 0, 0, {0, 0}, ""},
    {"softplus", Act::kAnySoftplus, 0, 2, {1, 20}, "beta, threshold"},
    {"relu6", Act::kHardtanh, 0, 0, {0, 6}, ""},
    {"selu",
     Act::kElu,
     0,
     0,
     {1.6732632423543772848170429916717 * 1.0507009873554804934193349852946, 1.0507009873554804934193349852946},
     ""},
    {"celu", Act::kCelu, 0, 1, {1, 1}, "alpha"},
    {"clamp", Act::kClamp, 2, 2, {0, 0}, "min, max"},
    {"threshold", Act::kThreshold, 2, 2, {0, 0}, "threshold, value"},
    {"hardsigmoid", Act::kHardsigmoid, 0, 0, {0, 0}, ""},
    {"logsigmoid", Act::kLogsigmoid, 0, 0, {0, 0}, ""},
    {"softsign", Act::kSoftsign, 0, 0, {0, 0}, ""},
    {"tanhshrink", Act::kTanhshrink, 0, 0, {0, 0}, ""},
    {"softshrink", Act::kSoftshrink, 0, 1, {0.5, 0}, "lambd"},
    {"hardshrink", Act::kHardshrink, 0, 1, {0.5, 0}, "lambd"},
    {"add", Act::kAdd, 1, 1, {0, 0}, "other"},
    {"mul", Act::kMul, 1, 1, {0, 0}, "other"},
};

namespace act_names {

inline std::string_view stripped(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// A decimal number, "inf" or "nan" with a sign or none, in every locale. False for anything else.
inline bool parse_number(std::string_view text, double* number) {
  const std::string_view unsigned_text = !text.empty() && (text[0] == '-' || text[0] == '+') ? text.substr(1) : text;
  if (unsigned_text.empty()) return false;
  if (unsigned_text == "inf") {
    *number = text[0] == '-' ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
    return true;
  }
  if (unsigned_text == "nan") {
    *number = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  for (char c : unsigned_text) {
    if (!((c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '-' || c == '+')) return false;
  }
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string terminated(text);
  char* end = nullptr;
  *number = strtod_l(terminated.c_str(), &end, plain);
  return end == terminated.c_str() + terminated.size();
}

// Why PyTorch's function, or this library's, does not take such parameters; "" where it does.
inline const char* refusal(const ActName& name, const double (&p)[2]) {
  for (int i = 0; i < name.most; ++i) {
    if (std::isnan(p[i])) return "numbers that are not NaN";
    if (std::isinf(p[i]) && name.act != Act::kClamp && name.act != Act::kHardtanh) return "finite numbers";
  }
  if (name.act == Act::kHardtanh && p[0] > p[1]) return "min_val up to max_val";
  if (name.act == Act::kAnySoftplus && p[0] == 0) return "a beta other than 0";
  if (name.act == Act::kCelu && p[0] <= 0) return "an alpha above 0";
  if (name.act == Act::kSoftshrink && p[0] < 0) return "a lambd of at least 0";
  return "";
}

// "name" or "name(1,2)" behind the others of a chain. False, with a message in *error.
inline bool append(std::string_view one, const std::string& text, ActChain* chain, std::string* error) {
  const size_t open = one.find('(');
  const std::string_view called = stripped(one.substr(0, open));
  const ActName* name = nullptr;
  for (const ActName& known : kActNames) {
    if (called == known.name) {
      name = &known;
      break;
    }
  }
  if (name == nullptr) {
    *error =
        "names an unknown activation '" + std::string(called) + "' in '" + text + "'; expected a '+'-joined chain of";
    for (const ActName& known : kActNames) {
      *error += " " + std::string(known.name);
      if (known.most > 0) *error += std::string("(") + known.parameters + ")";
    }
    return false;
  }
  double given[2] = {name->defaults[0], name->defaults[1]};
  int count = 0;
  if (open != std::string_view::npos) {
    if (one.back() != ')') {
      *error = "is '" + text + "', expected a ')' at the end of '" + std::string(one) + "'";
      return false;
    }
    std::string_view rest = one.substr(open + 1, one.size() - open - 2);
    for (bool more = !stripped(rest).empty(); more;) {
      const size_t comma = rest.find(',');
      const std::string_view number = stripped(rest.substr(0, comma));
      more = comma != std::string_view::npos;
      if (more) rest.remove_prefix(comma + 1);
      double value = 0;
      if (!parse_number(number, &value)) {
        *error = "is '" + text + "', in which " + std::string(name->name) + " has the parameter '" +
                 std::string(number) + "', expected a number";
        return false;
      }
      if (count < 2) given[count] = value;
      ++count;
    }
  }
  if (count < name->least || count > name->most) {
    *error = "is '" + text + "', in which " + std::string(name->name) + " has " + std::to_string(count) +
             (count == 1 ? " parameter, expected " : " parameters, expected ");
    if (name->least < name->most) *error += "at most ";
    *error += std::to_string(name->most);
    if (name->most > 0) *error += std::string(" (") + name->parameters + ")";
    return false;
  }
  const char* const expected = refusal(*name, given);
  if (*expected != 0) {
    *error = "is '" + text + "', in which " + std::string(name->name) +
             " has parameters that it does not take, expected " + expected;
    return false;
  }
  if (name->act == Act::kNone) return true;
  if (chain->length == ActChain::kMaxActs) {
    *error = "has more than 15 activations: '" + text + "'";
    return false;
  }
  Act act = name->act;
  if (act == Act::kCelu) given[1] = 1 / given[0];
  if (act == Act::kAnySoftplus && given[0] == 1 && given[1] == 20) act = Act::kSoftplus;
  int row = 0;
  if (takes_parameters(act)) {
    // Rows are filled from the first on; the codes say how many there are.
    int rows = 0;
    for (int i = 0; i < chain->length; ++i) {
      if (takes_parameters(chain->at(i))) rows = std::max(rows, (chain->codes[i] >> 5) + 1);
    }
    while (row < rows && std::memcmp(chain->exact[row], given, sizeof(given)) != 0) ++row;
    if (row == ActChain::kMaxParameters) {
      *error = "has activations of more than 6 different parameters: '" + text + "'";
      return false;
    }
    for (int i = 0; i < 2; ++i) {
      chain->exact[row][i] = given[i];
      chain->parameters[row][i] = static_cast<float>(given[i]);
    }
  }
  chain->codes[chain->length++] = static_cast<uint8_t>(static_cast<int>(act) | row << 5);
  return true;
}

}  // namespace act_names

// Parses "tanh+leaky_relu(0.2)"; "none" and "" add nothing. False, with a message without its subject in *error, where
// it is no such chain.
inline bool parse_act_chain(const std::string& text, ActChain* chain, std::string* error) {
  *chain = ActChain{};
  if (text.empty() || text == "none") return true;
  const std::string_view all(text);
  size_t begin = 0;
  bool inside = false;
  for (size_t at = 0; at <= all.size(); ++at) {
    const char c = at < all.size() ? all[at] : '+';
    if (c == '(') inside = true;
    if (c == ')') inside = false;
    if (c != '+' || (inside && at < all.size())) continue;  // the one in 1e+22
    if (!act_names::append(act_names::stripped(all.substr(begin, at - begin)), text, chain, error)) return false;
    begin = at + 1;
  }
  return true;
}

}  // namespace kgopt
