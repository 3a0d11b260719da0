// A page small enough to be worked by hand: report_in_browser.cmake knows what a browser must make of it.
//
// Two layers of one kv_head. Step 0 reads positions 0 and 1; step 1 reads 2, and layer 0 evicts 0; step 2 reads 3, and both
// evict 1. After step 1 layers hold {1, 2} and {0, 1, 2}: of 2 heads, position 0 is held by 1, the next by 2 and 2.
#include <fstream>
#include <report/report.hpp>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const toy::Recording recording{
      .facts = {{"a fact", "</script><b>&amp;"}},
      .num_layers = 2,
      .kv_heads = 1,
      .texts = {"<s>", "caf\xC3\xA9\n", "\xE2", "\"\\</script>"},
      .steps = {{.new_tokens = 2, .held = {{0, 1}, {0, 1}}, .weights = {{0.25, 0.75}, {1, 0}}},
                {.new_tokens = 1, .held = {{1, 2}, {0, 1, 2}}, .weights = {{0, 0.061, 0.939}, {0.06, 0.501, 0.439}}},
                {.new_tokens = 1, .held = {{2, 3}, {0, 2, 3}}, .weights = {{0, 0.5, 0.5}, {0.2, 0, 0.3, 0.5}}}}};
  const std::vector<toy::QualityPoint> points{
      {.measure = "answers <right>", .policy = "full", .budget = 512, .bytes = 327680, .value = 0.998},
      {.measure = "answers <right>", .policy = "scissorhands", .budget = 64, .bytes = 40960, .value = 0.6812345678, .low = 0.65, .high = 0.71},
      {.measure = "answers <right>", .policy = "scissorhands", .budget = 128, .bytes = 81920, .value = 0.8},
      {.measure = "perplexity", .policy = "full", .budget = 512, .bytes = 327680, .value = 3.5, .higher_is_better = false},
      {.measure = "perplexity", .policy = "snapkv", .budget = 64, .bytes = 40960, .value = 35, .low = 30, .high = 40, .higher_is_better = false}};
  std::ofstream out(argv[1], std::ios::binary);
  toy::write_report(out, &recording, points);
  return out.flush() ? 0 : 1;
}
