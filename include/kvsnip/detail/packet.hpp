// Packets of floats, loaded from whatever is stored, and softmax over them. The kernels' only contact with the machine: everything else is
// written once, for SSE, AVX2, AVX-512 and NEON alike. Half conversion is ours because Eigen 3.4 under GCC never uses F16C.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvsnip/detail/convert.hpp"
#include "kvsnip/policy.hpp"

#if defined(EIGEN_VECTORIZE_AVX)
#include <immintrin.h>
#endif

namespace kvsnip::detail {

using Packet = Eigen::internal::packet_traits<float>::type;
inline constexpr Index packet_size = Eigen::internal::packet_traits<float>::size;

/// The next packet_size elements as floats.
inline Packet load(const float* x) { return Eigen::internal::ploadu<Packet>(x); }

inline Packet load(const Eigen::half* x) {
#if defined(EIGEN_VECTORIZE_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(EIGEN_VECTORIZE_AVX) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  alignas(64) float buffer[packet_size];
  for (Index i = 0; i < packet_size; ++i) buffer[i] = to_float(x[i]);
  return Eigen::internal::pload<Packet>(buffer);
#endif
}

inline Packet load(const Eigen::bfloat16* x) {
#if defined(EIGEN_VECTORIZE_AVX512)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
#elif defined(EIGEN_VECTORIZE_AVX) && defined(__AVX2__)
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
#else
  alignas(64) float buffer[packet_size];
  for (Index i = 0; i < packet_size; ++i) buffer[i] = to_float(x[i]);
  return Eigen::internal::pload<Packet>(buffer);
#endif
}

/// Store packets rounded to nearest, ties to even.
inline void store(Eigen::half* out, Packet x) {
#if defined(EIGEN_VECTORIZE_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(EIGEN_VECTORIZE_AVX) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  alignas(64) float buffer[packet_size];
  Eigen::internal::pstore(buffer, x);
  for (Index i = 0; i < packet_size; ++i) out[i] = static_cast<Eigen::half>(buffer[i]);
#endif
}

/// The first n lanes, from and to memory that ends there.
inline Packet load_first(const float* x, Index n) {
  if (n == packet_size) return load(x);
  alignas(64) float lanes[packet_size] = {};
  std::copy_n(x, n, lanes);
  return Eigen::internal::pload<Packet>(lanes);
}
inline void store_first(float* out, Index n, Packet x) {
  if (n == packet_size) return Eigen::internal::pstoreu(out, x);
  alignas(64) float lanes[packet_size];
  Eigen::internal::pstore(lanes, x);
  std::copy_n(lanes, n, out);
}

/// Between float and what is stored.
template <class From, class To>
void convert(const From* from, Index n, To* to) {
  const Index whole = n / packet_size * packet_size;
  if constexpr (std::same_as<From, To>) {
    std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(n) * sizeof(To));
  } else if constexpr (std::same_as<To, float>) {
    for (Index i = 0; i < whole; i += packet_size) Eigen::internal::pstoreu(to + i, load(from + i));
    for (Index i = whole; i < n; ++i) to[i] = to_float(from[i]);
  } else if constexpr (std::same_as<To, Eigen::half>) {
    for (Index i = 0; i < whole; i += packet_size) store(to + i, load(from + i));
    for (Index i = whole; i < n; ++i) to[i] = static_cast<To>(from[i]);
  } else {
    for (Index i = 0; i < n; ++i) {  // bfloat16 of a finite number, branch-free
      const auto bits = std::bit_cast<std::uint32_t>(from[i]);
      to[i] = std::bit_cast<To>(static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
    }
  }
}
/// SlotsView::ReadColumn for columns of T.
template <class T>
void read_column(const void* columns, Index head_dim, Index slot, float* out) {
  convert(static_cast<const T*>(columns) + slot * head_dim, head_dim, out);
}

/// Leaving::Write for columns of T.
template <class T>
void write_column(void* columns, Index head_dim, Index slot, const float* in) {
  convert(in, head_dim, static_cast<T*>(columns) + slot * head_dim);
}

/// Lane i of packet k becomes lane k of packet i.
template <class P, std::size_t N>
void transpose(P (&x)[N]) {
  if constexpr (N > 1) {
    Eigen::internal::PacketBlock<P, static_cast<int>(N)> block;
    std::copy(x, x + N, block.packet);
    Eigen::internal::ptranspose(block);
    std::copy(block.packet, block.packet + N, x);
  }
}

/// x, kept in a register, where compilers cannot see through it: GCC would rather load it again for every use, and -ffast-math
/// undo a rounding.
inline Packet pinned(Packet x) {
#if defined(EIGEN_VECTORIZE_AVX512) && defined(__GNUC__)
  asm("" : "+v"(x));  // any of 32
#elif defined(EIGEN_VECTORIZE_SSE) && defined(__GNUC__)
  asm("" : "+x"(x));
#else
  EIGEN_OPTIMIZATION_BARRIER(x)
#endif
  return x;
}

/// Each lane's bits, shifted.
template <class P>
P shift_left_23(P x) {
  namespace ei = Eigen::internal;
  if constexpr (std::same_as<P, float>) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) << 23);
  } else {
    using Integers = typename ei::unpacket_traits<P>::integer_packet;
    return ei::preinterpret<P>(ei::plogical_shift_left<23>(ei::preinterpret<Integers>(x)));
  }
}

/// 2^x for x <= 0; exactly 0 from -126.5 down. Relative error 1.6e-7.
inline Packet exp2_nonpositive(Packet x) {
  namespace ei = Eigen::internal;
  // x = n + f, |f| <= 1/2: adding 1.5 * 2^23 rounds to the integer n, and 127 more leaves the exponent of 2^n in the low bits.
  const Packet magic = ei::pset1<Packet>(12582912.0f + 127.0f);
  x = ei::pmax(x, ei::pset1<Packet>(-127.0f));
  const Packet shifted = pinned(ei::padd(x, magic));
  const Packet f = ei::psub(x, ei::psub(shifted, magic));
  // 2^f: the polynomial of degree 5 with 2^0 = 1 whose largest relative error is least.
  Packet y = ei::pset1<Packet>(0.00132647261f);
  for (const float c : {0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f, 1.0f}) y = ei::pmadd(y, f, ei::pset1<Packet>(c));
  return ei::pmul(y, shift_left_23(shifted));
}
/// Logits are scaled by this as well as by 1 / sqrt(head_dim), so that softmax needs powers of 2 only.
inline constexpr float log2_e = 1.44269504f;

/// Sums of the lanes of each of N packets.
template <int N>
inline void add_lanes(const Packet (&x)[N], float* sums) {
  // Packets are halved in number: [x0 x1 x0 x1 ...], [x0 x1 x2 x3 x0 ...], ..., [x0 ... x7 or x15].
#if defined(EIGEN_VECTORIZE_AVX512)
  if constexpr (N == 16) {
    __m512 y[8];
    for (int i = 0; i < 8; ++i) y[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; ++i) y[i] = _mm512_add_ps(_mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0x44), _mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0xEE));
    for (int i = 0; i < 2; ++i) y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0x44), _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0xEE));
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x88), _mm512_shuffle_f32x4(y[0], y[1], 0xDD)));
    return;
  }
#endif
#if defined(EIGEN_VECTORIZE_AVX)
  if constexpr (N == 8) {
    __m256 y[8];
    for (int i = 0; i < 8; ++i) {
#if defined(EIGEN_VECTORIZE_AVX512)
      y[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x[i]), 1)));
#else
      y[i] = x[i];
#endif
    }
    for (int i = 0; i < 4; ++i) y[i] = _mm256_add_ps(_mm256_unpacklo_ps(y[2 * i], y[2 * i + 1]), _mm256_unpackhi_ps(y[2 * i], y[2 * i + 1]));
    for (int i = 0; i < 2; ++i) y[i] = _mm256_add_ps(_mm256_shuffle_ps(y[2 * i], y[2 * i + 1], 0x44), _mm256_shuffle_ps(y[2 * i], y[2 * i + 1], 0xEE));
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(y[0], y[1], 0x20), _mm256_permute2f128_ps(y[0], y[1], 0x31)));
    return;
  }
#endif
  for (int i = 0; i < N; ++i) sums[i] = Eigen::internal::predux(x[i]);
}

/// The logit of a slot that a query cannot see. Finite: builds with -ffast-math have no infinity.
inline constexpr float hidden = -std::numeric_limits<float>::max();

/// Replace logits by 2^(logit - max), the weights but for a common factor. @return the largest logit, and the weights' sum;
/// with nothing visible all weights are 0
struct Softmax {
  float max = hidden, total = 0.0f;
};
inline Softmax unnormalised_softmax(float* logits, Index slots) {
  namespace ei = Eigen::internal;
  const Index whole = slots - slots % packet_size, rest = slots - whole;
  alignas(64) float tail[packet_size];  // the last slots, filled up with hidden ones
  std::fill_n(tail, packet_size, hidden);
  std::copy_n(logits + whole, rest, tail);

  Packet most = ei::pload<Packet>(tail);
  for (Index i = 0; i < whole; i += packet_size) most = ei::pmax(most, ei::ploadu<Packet>(logits + i));
  const float max = ei::predux_max(most);
  if (max == hidden) {
    std::fill_n(logits, slots, 0.0f);
    return {};
  }
  const Packet shift = ei::pset1<Packet>(max);
  Packet sum = ei::pset1<Packet>(0.0f);
  const auto exponential = [&](float* x) {
    const Packet e = exp2_nonpositive(ei::psub(ei::ploadu<Packet>(x), shift));
    ei::pstoreu(x, e);
    sum = ei::padd(sum, e);
  };
  for (Index i = 0; i < whole; i += packet_size) exponential(logits + i);
  exponential(tail);
  std::copy_n(tail, rest, logits + whole);
  return {max, ei::predux(sum)};
}

}  // namespace kvsnip::detail
