// What does KVCache::update add to a plain copy of the new token's keys and values?
//
// As in a model, one token goes through 16 layers of which nothing is in the caches: neither the books nor the slots that
// will be written. The plain copy writes the same columns of equally large arrays. Keys and values come as what is stored,
// or as float and are converted (held against the copy of what is stored, too). Then, in one layer, many tokens one after
// the other, and a prompt at once.
#include <cstring>

#include "bench.hpp"

using namespace bench;

namespace {

constexpr Index num_layers = 16, slots = 1024, room = 256, prompt = 2048;  // what evicts is streaming_llm at 1024 slots

template <class T>
struct Tokens {
  explicit Tokens(Index count) : k(MatrixXf::Random(llama.kv_heads * llama.head_dim, count).cast<T>()), v(k) {}
  Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic> k, v;
};

/// Keys and values without a cache: (head_dim, slots) of each kv_head one after the other.
template <class T>
class Arrays {
 public:
  explicit Arrays(Index num_slots)
      : num_slots_(num_slots), keys_(static_cast<std::size_t>(num_slots * llama.kv_heads * llama.head_dim)), values_(keys_) {}
  void append(const Tokens<T>& tokens) {
    if (next_ + tokens.k.cols() > num_slots_) next_ = 0;
    for (Index h = 0; h < llama.kv_heads; ++h)
      for (Index t = 0; t < tokens.k.cols(); ++t) {
        const Index to = (h * num_slots_ + next_ + t) * llama.head_dim;
        std::copy_n(tokens.k.col(t).data() + h * llama.head_dim, llama.head_dim, keys_.data() + to);
        std::copy_n(tokens.v.col(t).data() + h * llama.head_dim, llama.head_dim, values_.data() + to);
      }
    next_ += tokens.k.cols();
  }

 private:
  Index num_slots_, next_ = 0;
  std::vector<T> keys_, values_;
};

/// Holds `slots` tokens, and has memory for some more.
template <class T, kvsnip::Policy P>
kvsnip::KVCache<T, P> filled() {
  kvsnip::KVCache<T, P> cache(llama, slots);
  fill(cache, slots);
  const Tokens<float> more(room);
  cache.update(more.k, more.v).abandon();
  return cache;
}

/// Seconds of append(layer), called so many times for each of the layers.
/// @param start  called with each layer beforehand
template <class LayerType, class Append, class Start>
Task& time(Bench& bench, std::string name, std::string type, std::vector<LayerType> layers, int times, Append append, Start start) {
  const auto shared = std::make_shared<std::vector<LayerType>>(std::move(layers));
  return bench.time({.name = std::move(name),
                     .shape = text(llama),
                     .type = std::move(type),
                     .prepare = [=] { std::for_each(shared->begin(), shared->end(), start); },
                     .run = [=, &bench] {
                       const double before = bench.threads().seconds();
                       for (int i = 0; i < times; ++i)
                         for (LayerType& layer : *shared) append(layer);
                       return (bench.threads().seconds() - before) / (times * static_cast<double>(shared->size()));
                     }});
}

template <class LayerType, class Append>
Task& time(Bench& bench, std::string name, std::string type, std::vector<LayerType> layers, int times, Append append) {
  return time(bench, std::move(name), std::move(type), std::move(layers), times, append, [](LayerType&) {});
}

template <class T>
void add(Bench& bench, std::vector<std::function<void()>>& rows) {
  using Full = kvsnip::KVCache<T, kvsnip::Full>;
  const auto token = std::make_shared<Tokens<T>>(1), tokens = std::make_shared<Tokens<T>>(prompt);
  const auto floats = std::make_shared<Tokens<float>>(1);
  const auto copy = [=](Arrays<T>& to) { to.append(*token); };
  const auto update = [=](auto& cache) { (void)cache.update(token->k, token->v); };
  const auto reset = [](Full& cache) { cache.reset(); };
  const std::string type = type_name<T>();
  const auto against = [&](const Task& plain, const Task& task, Limits limits) {
    rows.push_back([&bench, &plain, &task, limits] { bench.row(task, over(task, plain), "plain copy", limits); });
  };

  const Task& one = time(bench, "plain copy", type, std::vector(num_layers, Arrays<T>(slots + room)), 1, copy);
  rows.push_back([&bench, &one] { bench.row(one, over(one, one), "plain copy"); });
  against(one, time(bench, "update", type, std::vector(num_layers, filled<T, kvsnip::Full>()), 1, update), {2.0, 1.2});
  if (!std::is_same_v<T, float>)
    against(one, time(bench, "update, from float", type, std::vector(num_layers, filled<T, kvsnip::Full>()), 1,
                      [=](Full& cache) { (void)cache.update(floats->k, floats->v); }), {});
  against(one, time(bench, "update that evicts", type, std::vector(num_layers, filled<T, kvsnip::StreamingLLM>()), 1, update), {});

  const Task& many = time(bench, "plain copy, again and again", type, std::vector(1, Arrays<T>(slots)), 1000, copy);
  against(many, time(bench, "update, again and again", type, std::vector(1, filled<T, kvsnip::Full>()), 1000, update, reset), {});
  against(many, time(bench, "update that evicts, again and again", type, std::vector(1, filled<T, kvsnip::StreamingLLM>()), 1000, update),
          {});

  Full empty(llama, prompt);
  fill(empty, prompt);
  const Task& whole = time(bench, "plain copy of 2048 tokens", type, std::vector(1, Arrays<T>(prompt)), 1,
                           [=](Arrays<T>& to) { to.append(*tokens); });
  against(whole, time(bench, "update by a prompt of 2048 tokens", type, std::vector(1, empty), 1,
                      [=](Full& cache) { (void)cache.update(tokens->k, tokens->v); }, reset), {});
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "What does KVCache::update add to a plain copy of the new token's keys and values?");
  std::vector<std::function<void()>> rows;
  add<float>(bench, rows);
  add<Eigen::half>(bench, rows);
  add<Eigen::bfloat16>(bench, rows);
  bench.measure(bench.quick() ? 7 : 21);
  for (const auto& row : rows) row();
  return bench.report();
}
