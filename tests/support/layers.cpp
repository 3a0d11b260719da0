#include "layer.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kvsnip.hpp>
#include <kvsnip/registry.hpp>

#include <atomic>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace test {

void serially(Index n, FunctionRef fn) {
  for (Index i = 0; i < n; ++i) fn(i);
}

ParallelFor on_threads(Index num_threads) {
  return [num_threads](Index n, FunctionRef fn) {
    std::atomic<Index> next{0};
    std::vector<std::thread> threads;
    for (Index t = 0; t < num_threads; ++t)
      threads.emplace_back([&] {
        for (Index i = next++; i < n; i = next++) fn(i);
      });
    for (std::thread& thread : threads) thread.join();
  };
}

namespace {

template <class Columns>
Eigen::MatrixXf to_float(const Columns& columns) {
  Eigen::MatrixXf out(columns.rows(), columns.cols());
  for (Index i = 0; i < columns.size(); ++i) out.data()[i] = static_cast<float>(columns.data()[i]);
  return out;
}

template <class T, class P>
class LayerOf final : public Layer {
  using Cache = kvsnip::KVCache<T, P>;

 public:
  LayerOf(const Shape& shape, Index budget, P policy) : cache_(shape, budget, std::move(policy), kvsnip::Rope::standard(shape.head_dim, kvsnip::Rope::Pairing::half_split)) {}
  std::unique_ptr<Layer> clone() const override { return std::unique_ptr<Layer>(new LayerOf(cache_)); }

  const Shape& shape() const override { return cache_.shape(); }
  Index budget() const override { return cache_.budget(); }
  Index budget(Index kv_head) const override { return cache_.budget(kv_head); }
  Index tokens_seen() const override { return cache_.tokens_seen(); }
  Index size(Index kv_head) const override { return cache_.size(kv_head); }
  Index capacity(Index kv_head) const override { return cache_.capacity(kv_head); }
  kvsnip::Bytes bytes() const override { return cache_.bytes(); }
  Index object_bytes() const override { return static_cast<Index>(sizeof(*this)); }
  std::vector<Index> positions(Index kv_head) const override { return list(cache_.positions(kv_head)); }
  Eigen::MatrixXf keys(Index kv_head) const override { return to_float(cache_.keys(kv_head)); }
  Eigen::MatrixXf values(Index kv_head) const override { return to_float(cache_.values(kv_head)); }
  Eigen::MatrixXf stored(const Eigen::MatrixXf& x) const override { return x.unaryExpr([](float f) { return static_cast<float>(static_cast<T>(f)); }); }
  void reset() override { cache_.reset(); }

  void update(const Eigen::Ref<const Eigen::MatrixXf>& k, const Eigen::Ref<const Eigen::MatrixXf>& v, const UpdateOptions& options) override {
    step_.emplace(cache_.update(k, v, options));
  }
  Phase phase() const override { return step_->phase(); }
  Index step_size(Index kv_head) const override { return step_->size(kv_head); }
  std::vector<Index> step_positions(Index kv_head) const override { return list(step_->positions(kv_head)); }
  std::vector<Index> new_slots(Index kv_head) const override { return list(step_->new_slots(kv_head)); }
  Index num_queries() const override { return step_->num_queries(); }
  Index first_position() const override { return step_->first_position(); }
  Index wanted_rows() const override { return step_->wanted_rows(); }
  Index wanted_queries() const override { return step_->wanted_queries(); }
  bool wants_column_sums() const override { return step_->wants_column_sums(); }
  void attend(const Eigen::Ref<const Eigen::MatrixXf>& q, Eigen::Ref<Eigen::MatrixXf> out, const ParallelFor& parallel_for) override {
    kvsnip::attend(*step_, q, out, parallel_for);
  }
  void on_attention(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& weights) override { step_->on_attention(kv_head, weights); }
  void on_column_sums(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& sums) override { step_->on_column_sums(kv_head, sums); }
  void on_queries(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& q) override { step_->on_queries(kv_head, q); }
  void done(Index kv_head) override { step_->done(kv_head); }
  void abandon() override { step_->abandon(); }

 private:
  explicit LayerOf(const Cache& cache) : cache_(cache) {}
  static std::vector<Index> list(std::span<const Index> positions) { return {positions.begin(), positions.end()}; }

  Cache cache_;
  std::optional<typename Cache::Step> step_;
};

template <class P>
PolicyCase with_own_type(const std::string& name, const P& policy, const Promise& promise) {
  return {name, "float", to_string(kvsnip::AnyPolicy(policy)),
          [policy](const Shape& shape, Index budget) -> std::unique_ptr<Layer> { return std::make_unique<LayerOf<float, P>>(shape, budget, policy); },
          promise};
}
PolicyCase behind_any_policy(const std::string& type, const kvsnip::AnyPolicy& policy, const Promise& promise) {
  return {type + ", " + to_string(policy), type, to_string(policy),
          [type, policy](const Shape& shape, Index budget) { return make_layer(type, policy, shape, budget); }, promise};
}

/// One filter for all kv_heads, so that they are alike.
kvsnip::AnyPolicy q_filter(const Shape& shape) {
  return kvsnip::AnyPolicy(kvsnip::QFilter(Random(6).matrix(shape.head_dim, 1).replicate(1, shape.kv_heads), {.num_sinks = 2, .recent_window = 4, .refill_interval = 3}));
}
PolicyCase with_filters(const std::string& type, const Promise& promise) {
  return {type + ", QFilter", type, "custom", [type](const Shape& shape, Index budget) { return make_layer(type, q_filter(shape), shape, budget); }, promise};
}

/// The first kv_head streams, the others keep everything.
PolicyCase with_retrieval_heads(const std::string& type) {
  const auto make = [type](const Shape& shape, Index budget) {
    std::vector<bool> is_retrieval_head(static_cast<std::size_t>(shape.kv_heads), true);
    is_retrieval_head.front() = false;
    return make_layer(type, kvsnip::AnyPolicy(kvsnip::DuoAttention(is_retrieval_head, {.num_sinks = 2})), shape, budget);
  };
  return {type + ", DuoAttention", type, "custom", make, {.prompt_sinks = 2, .decode_sinks = 2, .recent_window = 1, .grows = true, .heads_alike = false}};
}

std::vector<PolicyCase> list_policies() {
  using namespace kvsnip;
  const StreamingLLM streaming_llm{{.num_sinks = 2}};
  const Scissorhands fraction{{.history_window = 9, .recent_window = 4, .num_sinks = 2, .drop = 3}};
  const Scissorhands sampled{{.history_window = 5, .recent_window = 1, .num_sinks = 0, .record_interval = 3}};
  const Scissorhands count{{.history_window = 9, .recent_window = 4, .num_sinks = 2, .mode = Scissorhands::Mode::count}};
  const SnapKV snapkv{{.observation_window = 5, .kernel_size = 3, .num_sinks = 1}};
  const SnapKV snapkv_max{{.observation_window = 4, .pooling = SnapKV::Pooling::max, .pool_over = SnapKV::PoolOver::row, .group = SnapKV::Group::max}};
  const KeyNorm key_norm{{.num_sinks = 2, .recent_window = 4, .refill_interval = 3}};
  const KeyDiff key_diff{{.num_sinks = 2, .recent_window = 4, .refill_interval = 3}};
  const CUR cur{{.local_window = 3, .num_sinks = 2, .recent_window = 4, .refill_interval = 3}};
  const LagKV lag_kv{{.lag_size = 3, .num_sinks = 2, .recent_window = 4, .refill_interval = 3}};
  const Finch finch{{.observation_window = 5, .num_sinks = 1}};
  const kvsnip::Random random{{.seed = 5, .num_sinks = 2, .recent_window = 4}};  // not test::Random
  const KeepItOdd keep_it_odd{{.num_sinks = 2, .recent_window = 4, .refill_interval = 2}};
  const H2O h2o{{.num_sinks = 2, .recent_window = 4, .refill_interval = 3}};
  const H2O h2o_of_rows{{.score = H2O::Score::mean, .history_window = 7, .decay = 0.9, .threshold = true, .num_sinks = 2, .recent_window = 4}};
  const H2O heavy_hitter{{.score = H2O::Score::mean, .prompt_as_one_row = true, .num_sinks = 2, .recent_window = 4, .refill_interval = 3}};

  const Promise keeps_all{.evicts_prompt = false, .evicts_decode = false};
  const Promise keeps_newest{.prompt_sinks = 2, .decode_sinks = 2, .recent_window = 1};
  const Promise keeps_recents{.prompt_sinks = 2, .decode_sinks = 2, .kept_of_prompt = 3, .recent_window = 4};
  const Promise keeps_recents_in_bulk{.prompt_sinks = 2, .decode_sinks = 2, .kept_of_prompt = 3, .recent_window = 4, .drops_in_bulk = true};
  const Promise keeps_recents_by_head{.prompt_sinks = 2, .decode_sinks = 2, .kept_of_prompt = 3, .recent_window = 4, .heads_alike = false};
  const Promise keeps_window{.evicts_decode = false, .prompt_sinks = 1, .kept_of_prompt = 5};
  const Promise keeps_window_by_head{.evicts_decode = false, .prompt_sinks = 1, .kept_of_prompt = 5, .heads_alike = false};
  const Promise window_then_recents{.prompt_sinks = 1, .decode_sinks = 2, .kept_of_prompt = 5, .recent_window = 4};
  const Promise newest_then_recents{.prompt_sinks = 2, .decode_sinks = 2, .recent_window = 4, .drops_in_bulk = true};

  std::vector<PolicyCase> policies{
      with_own_type("Full", Full{}, keeps_all),
      with_own_type("StreamingLLM", streaming_llm, keeps_newest),
      with_own_type("Scissorhands, fraction", fraction, keeps_recents),
      with_own_type("Scissorhands, count", count, keeps_recents_in_bulk),
      with_own_type("Chain<SnapKV, Scissorhands>", Chain{snapkv, fraction}, window_then_recents),
      with_own_type("KeyNorm", key_norm, keeps_recents),
  };
  for (const std::string type : {"float", "half", "bfloat16"}) {
    Index number = 0;
    const auto is_wanted = [&] { return type == "float" || (++number % 2 == 0) == (type == "half"); };  // one of the two 16-bit types for each
    const auto add = [&](const auto& policy, const Promise& promise) {
      if (is_wanted()) policies.push_back(behind_any_policy(type, AnyPolicy(policy), promise));
    };
    add(Full{}, keeps_all);
    add(streaming_llm, keeps_newest);
    add(fraction, keeps_recents);
    add(sampled, {.recent_window = 1});
    add(count, keeps_recents_in_bulk);
    add(snapkv, keeps_window);
    add(snapkv_max, {.evicts_decode = false, .kept_of_prompt = 4});
    add(key_norm, keeps_recents);
    add(key_diff, keeps_recents);
    if (is_wanted()) policies.push_back(with_filters(type, keeps_recents));
    add(cur, keeps_recents);
    add(lag_kv, keeps_recents);
    add(finch, keeps_window);
    add(random, keeps_recents_by_head);
    add(keep_it_odd, keeps_recents);
    add(h2o, keeps_recents);
    add(h2o_of_rows, keeps_recents);
    add(Chain{snapkv, heavy_hitter}, window_then_recents);
    add(Chain{snapkv, fraction}, window_then_recents);
    add(Chain{AdaKV<SnapKV>(snapkv), fraction}, window_then_recents);
    add(ChunkKV<KeyNorm>(key_norm, {.chunk_length = 3}), {.prompt_sinks = 2, .decode_sinks = 2, .kept_of_prompt = 3, .recent_window = 4, .heads_alike = false});
    add(Periodic<SnapKV>(snapkv, {.interval = 4}),
        {.prompt_sinks = 1, .decode_sinks = 1, .kept_of_prompt = 5, .recent_window = 6, .drops_in_bulk = true, .allocates = true});
    add(Merging<KeyNorm>(key_norm), {.prompt_sinks = 2, .decode_sinks = 2, .kept_of_prompt = 3, .recent_window = 4, .merges = true});
    add(LossEstimate<KeyNorm>(key_norm), keeps_recents);
    add(TOVA{{.num_sinks = 2, .recent_window = 4, .refill_interval = 3}}, keeps_recents);
    add(LeverageScore{{.num_sinks = 1, .recent_window = 6}}, keeps_window_by_head);
    add(NonCausalAttention{{.chunk_size = 7, .num_sinks = 1, .recent_window = 6}}, keeps_window);
    add(Compactor{{.chunk_size = 16, .num_sinks = 1, .recent_window = 6}}, keeps_window_by_head);
    add(ExpectedAttention{{.num_future_positions = 9, .num_sinks = 1, .recent_window = 6}}, keeps_window);
    add(RKV{{.observation_window = 5, .kernel_size = 3, .num_sinks = 1}}, keeps_window);
    add(SimLayerKV{{.num_sinks = 2, .recent_window = 4, .threshold = 0}}, keeps_recents);  // lazy whatever it sees
    if (is_wanted()) policies.push_back(with_retrieval_heads(type));
    add(Chain{streaming_llm, count}, newest_then_recents);
  }
  return policies;
}

}  // namespace

const std::vector<PolicyCase>& all_policies() {
  static const std::vector<PolicyCase> policies = list_policies();
  return policies;
}

std::unique_ptr<Layer> make_layer(std::string_view type, const kvsnip::AnyPolicy& policy, const Shape& shape, Index budget) {
  const auto of = [&]<class T>(const T*) -> std::unique_ptr<Layer> { return std::make_unique<LayerOf<T, kvsnip::AnyPolicy>>(shape, budget, policy); };
  if (type == "float") return of(static_cast<const float*>(nullptr));
  if (type == "half") return of(static_cast<const Eigen::half*>(nullptr));
  if (type == "bfloat16") return of(static_cast<const Eigen::bfloat16*>(nullptr));
  throw std::invalid_argument("make_layer: no storage type " + std::string(type));
}
std::unique_ptr<Layer> make_layer(std::string_view type, std::string_view spec, const Shape& shape, Index budget) {
  return make_layer(type, kvsnip::make_policy(spec), shape, budget);
}

bool same_bits(const Eigen::MatrixXf& a, const Eigen::MatrixXf& b) {
  return a.rows() == b.rows() && a.cols() == b.cols() &&
         (a.size() == 0 || std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.size()) * sizeof(float)) == 0);
}

bool same_bytes(const Layer& a, const Layer& b) {
  bool same = a.tokens_seen() == b.tokens_seen();
  for (Index h = 0; h < a.num_heads(); ++h)
    same = same && a.positions(h) == b.positions(h) && same_bits(a.keys(h), b.keys(h)) && same_bits(a.values(h), b.values(h));
  return same;
}

}  // namespace test
