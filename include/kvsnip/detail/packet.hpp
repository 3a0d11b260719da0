// Packets of floats, loaded from whatever is stored. The kernels' only contact with the machine: everything else is
// written once, for SSE, AVX2, AVX-512 and NEON alike. Half conversion is ours because Eigen 3.4 under GCC never uses F16C.
#pragma once

#include "kvsnip/detail/convert.hpp"
#include "kvsnip/policy.hpp"

#if defined(__F16C__) || defined(__AVX2__)
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
  convert(x, packet_size, buffer);
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
  convert(x, packet_size, buffer);
  return Eigen::internal::pload<Packet>(buffer);
#endif
}

/// Sums of the lanes of each of N packets.
template <int N>
inline void add_lanes(const Packet (&packets)[N], float* sums) {
  namespace ei = Eigen::internal;
  if constexpr (packet_size > 1 && N % packet_size == 0) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"  // of a vector type as template argument
    ei::PacketBlock<Packet, packet_size> block;
#pragma GCC diagnostic pop
    for (int part = 0; part < N; part += static_cast<int>(packet_size)) {
      for (Index i = 0; i < packet_size; ++i) block.packet[i] = packets[part + i];
      ei::ptranspose(block);
      for (Index step = 1; step < packet_size; step *= 2)
        for (Index i = 0; i < packet_size; i += 2 * step) block.packet[i] = ei::padd(block.packet[i], block.packet[i + step]);
      ei::pstoreu(sums + part, block.packet[0]);
    }
  } else {
    for (int i = 0; i < N; ++i) sums[i] = ei::predux(packets[i]);
  }
}

}  // namespace kvsnip::detail
