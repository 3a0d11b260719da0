// Runs every case of a folder of golden vectors that a test knows how to run, and says at the end how many of each kind
// there were, how many passed, and what nobody looked at.
#pragma once

#include <exception>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "catch.hpp"
#include "golden.hpp"
#include "shared_dir.hpp"

namespace test {

/// What is wrong with one case; the first few things, since they tend to be one thing.
class Findings {
 public:
  template <class... Parts>
  void check(bool ok, const Parts&... parts) {
    if (ok || ++count_ > 4) return;
    std::ostringstream message;
    (message << ... << parts);
    text_ += "\n  " + message.str();
  }
  bool none() const { return count_ == 0; }
  std::string text() const { return text_ + (count_ > 4 ? "\n  and " + std::to_string(count_ - 4) + " more" : ""); }

 private:
  int count_ = 0;
  std::string text_;
};

/// Checks a case; a throw counts as a finding.
using GoldenCheck = void (*)(const GoldenCase&, Findings&);

/// The checks of all kinds, by label: kind, or kind and what varies within it ("kvpress_score knorm").
inline std::map<std::string, GoldenCheck>& golden_checks() {
  static std::map<std::string, GoldenCheck> checks;
  return checks;
}
/// A file of checks makes them known: const RegisterGolden kinds{{{"label", check}, ...}};
struct RegisterGolden {
  explicit RegisterGolden(const std::map<std::string, GoldenCheck>& checks) { golden_checks().insert(checks.begin(), checks.end()); }
};

/// How a case is run, nullptr: not covered yet; and the name it is counted under.
struct GoldenRunner {
  std::string label;
  GoldenCheck check = nullptr;
};

/// @param folder      name in the shared folder
/// @param runner_for  GoldenCase -> GoldenRunner
template <class RunnerFor>
void run_golden_cases(const std::string& folder, const RunnerFor& runner_for) {
  const auto path = find_shared(folder, folder + " cases");
  if (!path) return;
  struct Count {
    int cases = 0, passed = 0;
  };
  std::map<std::string, Count> covered;
  std::map<std::string, int> not_covered;
  for (const std::string& name : read_index(*path)) {
    GoldenRunner runner{"unreadable"};
    Findings findings;
    try {
      const GoldenCase golden(*path / name);
      runner = runner_for(golden);
      if (runner.check == nullptr) {
        ++not_covered[runner.label];
        continue;
      }
      runner.check(golden, findings);
    } catch (const std::exception& error) {
      findings.check(false, error.what());
    }
    Count& count = covered[runner.label];
    ++count.cases;
    count.passed += findings.none();
    INFO(name << " (" << runner.label << "):" << findings.text());
    CHECK(findings.none());
  }

  const auto print = [&](const std::string& kind, const auto& cases, const auto& passed) {
    std::cout << folder << ": " << std::left << std::setw(32) << kind << std::right << std::setw(6) << cases
              << std::setw(8) << passed << '\n';
  };
  print("kind", "cases", "passed");
  int total = 0;
  for (const auto& [label, count] : covered) {
    print(label, count.cases, count.passed);
    total += count.cases;
  }
  std::cout << folder << ": not covered yet:";
  for (const auto& [label, count] : not_covered) std::cout << ' ' << label << " (" << count << ')';
  std::cout << std::endl;
  INFO("no case of " << path->string() << " was run");
  REQUIRE(total > 0);
}

}  // namespace test
