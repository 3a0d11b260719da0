#include <kvsnip/attention.hpp>
#include <kvsnip/registry.hpp>

#include "support/catch.hpp"

using namespace kvsnip;

namespace {
std::string error_of(const char* spec) {
  try {
    (void)make_policy(spec);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}
bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
}  // namespace

TEST_CASE("A spec sets the options it names and leaves the others at their defaults") {
  const AnyPolicy policy = make_policy("scissorhands(history_window=32, mode=count, keep_prompt=true)");
  const auto* scissorhands = policy.as<Scissorhands>();
  REQUIRE(scissorhands != nullptr);
  CHECK(scissorhands->options().history_window == 32);
  CHECK(scissorhands->options().mode == Scissorhands::Mode::count);
  CHECK(scissorhands->options().keep_prompt);
  CHECK(scissorhands->options().recent_window == ScissorhandsOptions{}.recent_window);
}

TEST_CASE("A plus chains the prompt's policy and the decode's") {
  const AnyPolicy policy = make_policy(" snapkv(observation_window=16) + scissorhands ");
  const auto* chain = policy.as<Chain<AnyPolicy, AnyPolicy>>();
  REQUIRE(chain != nullptr);
  CHECK(chain->prompt().as<SnapKV>()->options().observation_window == 16);
  CHECK(chain->decode().as<Scissorhands>() != nullptr);
}

TEST_CASE("A policy's text makes the same policy again") {
  for (const char* spec : {"full", "streaming_llm", "streaming_llm(num_sinks=0)", "scissorhands(history_window=32, mode=count)",
                           "key_norm(refill_interval=1)", "random(seed=-3)", "cur(leverage=value, local_window=0)", "lag_kv(cross_scoring=true)", "h2o(score=mean, history_window=400, decay=0.99, threshold=true)",
                           "finch(normalize=false)+keep_it_odd", "compactor(blending=0.25)+tova", "key_diff(num_sinks=4, recent_window=0)",
                           "ada_kv(snapkv)", "ada_kv(snapkv(observation_window=16), floor=0.35, safeguard=least)+scissorhands(drop=3)",
                           "chunk_kv(ada_kv(key_norm(num_sinks=2), floor=0), chunk_length=7)", "periodic(finch, interval=9)", "loss_estimate(snapkv+scissorhands)", "merging(periodic(snapkv), weights=similarity)",
                           "snapkv(pooling=max, pool_over=row, count_padding=false, group=max)+scissorhands(drop=3)"}) {
    CAPTURE(spec);
    CHECK(to_string(make_policy(spec)) == spec);
    CHECK(to_string(make_policy(to_string(make_policy(spec)))) == spec);
  }
}

TEST_CASE("Unknown words are named, with the nearest and the known ones") {
  CHECK(contains(error_of("scisorhands"), "unknown policy 'scisorhands', did you mean 'scissorhands'"));
  CHECK(contains(error_of("scisorhands"), "streaming_llm"));
  CHECK(contains(error_of("snapkv(observation=3)"), "unknown option 'observation', did you mean 'observation_window'"));
  CHECK(contains(error_of("snapkv(pooling=mean)"), "unknown pooling value 'mean'"));
  CHECK(contains(error_of("full(num_sinks=1)"), "unknown option 'num_sinks'"));
  CHECK(contains(error_of(""), "unknown policy ''"));
}

TEST_CASE("Bad values and bad syntax are refused") {
  CHECK(contains(error_of("snapkv(observation_window=many)"), "observation_window must be a whole number, got 'many'"));
  CHECK(contains(error_of("snapkv(observation_window=99999999999999999999)"), "must be a whole number"));
  CHECK(contains(error_of("snapkv(observation_window)"), "must be a whole number, got ''"));
  CHECK(contains(error_of("snapkv(count_padding=maybe)"), "count_padding must be true or false"));
  CHECK(contains(error_of("snapkv(kernel_size=4)"), "kernel_size must be odd"));
  CHECK(contains(error_of("snapkv(kernel_size=3"), "without ')'"));
  CHECK(contains(error_of("snapkv(kernel_size=3)x"), "without ')'"));
  CHECK(contains(error_of("snapkv+"), "unknown policy ''"));
  CHECK(contains(error_of("full+scissorhands"), "must compress prompts"));
}

TEST_CASE("A decorator's first argument is what it decorates, a chain too") {
  const AnyPolicy policy = make_policy("ada_kv( snapkv(observation_window=16, kernel_size=3) + scissorhands , floor=0.5)");
  const auto* ada = policy.as<AdaKV<AnyPolicy>>();
  REQUIRE(ada != nullptr);
  CHECK(ada->options().floor == 0.5);
  REQUIRE(ada->inner().as<Chain<AnyPolicy, AnyPolicy>>() != nullptr);
  CHECK(ada->inner().as<Chain<AnyPolicy, AnyPolicy>>()->prompt().as<SnapKV>()->options().kernel_size == 3);
  CHECK(contains(error_of("ada_kv"), "ada_kv needs a policy to decorate"));
  CHECK(contains(error_of("ada_kv(floor=0.5)"), "unknown policy 'floor=0.5'"));
  CHECK(contains(error_of("ada_kv(snapkv, flor=0.5)"), "did you mean 'floor'"));
  CHECK(contains(error_of("ada_kv(snapkv, floor=half)"), "floor must be a number, got 'half'"));
  CHECK(contains(error_of("ada_kv(snapkv, floor=2)"), "floor must be in [0, 1]"));
  CHECK(contains(error_of("ada_kv(snapkv(kernel_size=3)"), "without ')'"));
}

TEST_CASE("policies() lists what specs can name, and its defaults are the defaults") {
  const std::vector<PolicyInfo> all = policies();
  CHECK(all.size() > 20);
  for (const PolicyInfo& info : all) {
    CAPTURE(info.name);
    CHECK_FALSE(info.needs.empty());
    const std::string plain = info.decorates ? "(snapkv" : "(", spec = std::string(info.name) + plain + (info.decorates && !info.defaults.empty() ? ", " : "") + info.defaults + ")";
    CHECK(to_string(make_policy(spec)) == std::string(info.name) + (info.decorates ? "(snapkv)" : ""));
  }
  CHECK(std::any_of(all.begin(), all.end(), [](const PolicyInfo& info) { return info.name == "snapkv" && info.paper == "arXiv:2404.14469" && info.defaults.starts_with("observation_window=32, "); }));
}

TEST_CASE("A policy chosen at run time keeps what the template keeps") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 8};
  auto by_name = make_cache<float>("snapkv(observation_window=4)+scissorhands(drop=2)", shape, 24);
  KVCache<float, Chain<SnapKV, Scissorhands>> by_type(
      shape, 24, Chain<SnapKV, Scissorhands>{SnapKV{{.observation_window = 4}}, Scissorhands{{.drop = 2}}});
  for (const Index tokens : {50, 1, 1, 3, 1, 30, 1, 1, 1, 1, 1, 1, 1}) {
    const Eigen::MatrixXf k = Eigen::MatrixXf::Random(16, tokens), q = Eigen::MatrixXf::Random(32, tokens);
    Eigen::MatrixXf a(32, tokens), b(32, tokens);
    attend(by_name.update(k, k), q, a);
    attend(by_type.update(k, k), q, b);
    CHECK(a == b);
    for (Index h = 0; h < 2; ++h)
      CHECK(std::equal(by_name.positions(h).begin(), by_name.positions(h).end(), by_type.positions(h).begin(), by_type.positions(h).end()));
  }
}
