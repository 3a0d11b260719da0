// What the public reference implementations did with fixed inputs, done again through the public interface.
//
// The cases are found at run time; the folder's README says what each kind feeds and expects, golden_*_test.cpp how each
// is run. Two differences are ours: kept positions are ascending (references return them best first), so they are
// compared as sets; and our scores are sums over the window's rows, so they are divided where a reference takes the mean.

#include "support/golden_run.hpp"

TEST_CASE("The golden vectors of the public reference implementations are met") {
  test::run_golden_cases("golden", [](const test::GoldenCase& golden) {
    const std::string& kind = golden.text("kind");
    const std::string variant = golden.text_or("strategy", golden.text_or("method", golden.text_or("press", golden.text_or("wrapper", ""))));
    const std::string label = variant.empty() ? kind : kind + " " + variant;
    const auto found = test::golden_checks().find(label);
    return test::GoldenRunner{label, found == test::golden_checks().end() ? nullptr : found->second};
  });
}
