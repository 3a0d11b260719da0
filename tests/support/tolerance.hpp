// How far a result may be from the reference: one place for every test.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

namespace test {

/// Largest error of an attention output or weight whose inputs are stored as T and are of size one; sums are in
/// float32.
template <class T>
inline constexpr float tolerance = 2e-5f;
template <>
inline constexpr float tolerance<Eigen::half> = 4e-3f;  // 11 bits: inputs are off by up to 2^-12 of their size
template <>
inline constexpr float tolerance<Eigen::bfloat16> = 3e-2f;  // 8 bits: 2^-9

/// |got - want| <= absolute + relative * |want|. NaN is close to nothing.
inline bool close(double got, double want, double relative, double absolute) {
  return std::abs(got - want) <= absolute + relative * std::abs(want);
}

/// The largest difference of two matrices of one size; infinite when the sizes differ or a value is not finite.
template <class A, class B>
double largest_difference(const Eigen::MatrixBase<A>& a, const Eigen::MatrixBase<B>& b) {
  if (a.rows() != b.rows() || a.cols() != b.cols()) return INFINITY;
  double largest = 0;
  for (Eigen::Index col = 0; col < a.cols(); ++col)
    for (Eigen::Index row = 0; row < a.rows(); ++row) {
      const double difference = std::abs(static_cast<double>(a(row, col)) - static_cast<double>(b(row, col)));
      if (!(difference <= largest)) largest = std::isfinite(difference) ? difference : INFINITY;
    }
  return largest;
}

}  // namespace test
