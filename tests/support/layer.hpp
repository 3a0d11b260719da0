// A KVCache behind one type: test bodies are compiled once, and run for every storage type and policy.
#pragma once

#include "tokens.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvsnip {
class AnyPolicy;
}

namespace test {

using kvsnip::Phase;
using kvsnip::UpdateOptions;

/// Calls what it was made from; neither owns nor allocates.
class FunctionRef {
 public:
  template <class Fn>
    requires(!std::same_as<Fn, FunctionRef>)
  FunctionRef(const Fn& fn) : object_(&fn), call_([](const void* object, Index i) { (*static_cast<const Fn*>(object))(i); }) {}
  void operator()(Index i) const { call_(object_, i); }

 private:
  const void* object_;
  void (*call_)(const void*, Index);
};

/// An executor for attend(), chosen at run time.
using ParallelFor = std::function<void(Index, FunctionRef)>;
void serially(Index n, FunctionRef fn);
/// On so many threads; whichever is free takes the next i.
ParallelFor on_threads(Index num_threads);

/// Passes calls on and allocates nothing of its own once it is made.
class Layer {
 public:
  virtual ~Layer() = default;
  /// A copy of the cache, between steps.
  virtual std::unique_ptr<Layer> clone() const = 0;

  virtual const Shape& shape() const = 0;
  virtual Index budget() const = 0;
  virtual Index budget(Index kv_head) const = 0;
  virtual Index tokens_seen() const = 0;
  virtual Index size(Index kv_head) const = 0;
  virtual Index capacity(Index kv_head) const = 0;
  virtual kvsnip::Bytes bytes() const = 0;
  virtual Index object_bytes() const = 0;  ///< the cache's own size and this object's
  virtual std::vector<Index> positions(Index kv_head) const = 0;
  virtual Eigen::MatrixXf keys(Index kv_head) const = 0;  ///< as float: exact
  virtual Eigen::MatrixXf values(Index kv_head) const = 0;
  /// x as the cache stores it.
  virtual Eigen::MatrixXf stored(const Eigen::MatrixXf& x) const = 0;
  virtual void reset() = 0;

  /// Opens a step; what follows is about it.
  virtual void update(const Eigen::Ref<const Eigen::MatrixXf>& k, const Eigen::Ref<const Eigen::MatrixXf>& v, const UpdateOptions& options = {}) = 0;
  virtual Phase phase() const = 0;
  virtual Index step_size(Index kv_head) const = 0;
  virtual std::vector<Index> step_positions(Index kv_head) const = 0;
  virtual std::vector<Index> new_slots(Index kv_head) const = 0;
  virtual Index num_queries() const = 0;
  virtual Index first_position() const = 0;
  virtual Index wanted_rows() const = 0;
  virtual Index wanted_queries() const = 0;
  virtual bool wants_column_sums() const = 0;
  virtual void attend(const Eigen::Ref<const Eigen::MatrixXf>& q, Eigen::Ref<Eigen::MatrixXf> out, const ParallelFor& parallel_for = serially) = 0;
  virtual void on_attention(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& weights) = 0;
  virtual void on_column_sums(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& sums) = 0;
  virtual void on_queries(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& q) = 0;
  virtual void done(Index kv_head) = 0;
  virtual void abandon() = 0;

  /// Tokens [first, first + count) in one update.
  void update(const Tokens& tokens, Index first, Index count, const UpdateOptions& options = {}) {
    update(tokens.k.middleCols(first, count), tokens.v.middleCols(first, count), options);
  }
  /// The same, attended to. @return attend's output
  Eigen::MatrixXf feed(const Tokens& tokens, Index first, Index count, const UpdateOptions& options = {}, const ParallelFor& parallel_for = serially) {
    update(tokens, first, count, options);
    Eigen::MatrixXf out(tokens.q.rows(), count);
    attend(tokens.q.middleCols(first, count), out, parallel_for);
    return out;
  }
  Index num_heads() const { return shape().kv_heads; }
};

/// A cache of `type`: "float", "half" or "bfloat16".
std::unique_ptr<Layer> make_layer(std::string_view type, const kvsnip::AnyPolicy& policy, const Shape& shape, Index budget);
/// @param spec  the policy, as the registry reads it
std::unique_ptr<Layer> make_layer(std::string_view type, std::string_view spec, const Shape& shape, Index budget);

/// What a policy does and protects, said here once more and not read from the policy.
struct Promise {
  bool evicts_prompt = true, evicts_decode = true;
  Index prompt_sinks = 0, decode_sinks = 0;
  Index kept_of_prompt = 0;   ///< newest positions that a compaction keeps
  Index recent_window = 0;    ///< newest positions that survive a decode step
  bool drops_in_bulk = false;
  bool grows = false;         ///< some kv_head keeps everything
  bool merges = false;        ///< what goes into what stays: keys and values are not those of the tokens
  bool allocates = false;     ///< when it makes a choice while decoding
  bool heads_alike = true;    ///< the same tokens would be treated alike by every kv_head
};

/// A policy with options small enough to reach every edge; a budget must be at least 12.
struct PolicyCase {
  std::string name;
  std::string type;  ///< the storage type: "float", "half" or "bfloat16"
  std::string spec;  ///< the policy, as the registry writes it; "custom" if no spec can
  std::function<std::unique_ptr<Layer>(const Shape&, Index budget)> make;
  Promise promise;
};
/// Every policy behind AnyPolicy, with float and one of the 16-bit types; and of its own type with float, where that makes the cache another one:
/// a policy that scores nothing, that observes nothing, that needs every hook, and a chain.
const std::vector<PolicyCase>& all_policies();

/// Whether two caches hold the same tokens in the same slots, bit for bit.
bool same_bytes(const Layer& a, const Layer& b);
/// Whether two matrices are equal, bit for bit (a NaN equals itself, -0 is not 0).
bool same_bits(const Eigen::MatrixXf& a, const Eigen::MatrixXf& b);

}  // namespace test
