// How a planner refuses a problem: its plan, with the reason why.
#pragma once

namespace kgopt {

// A function of the reason that returns `plan`, what was found of it so far included.
template <typename Plan>
auto refuser(Plan& plan) {
  return [&plan](const char* why) {
    plan.refusal = why;
    return plan;
  };
}

// A plan of nothing else.
template <typename Plan>
Plan refused(const char* why) {
  Plan plan;
  plan.refusal = why;
  return plan;
}

}  // namespace kgopt
