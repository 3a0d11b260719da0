// ChunkKV's scores, literally.
#pragma once

#include <cstddef>
#include <vector>

namespace reference {

/// @param scores     of each head's slots
/// @param positions  likewise
/// @return each slot's score: the mean over everything, of any head, that lies in its chunk
inline std::vector<std::vector<double>> chunk_kv(const std::vector<std::vector<double>>& scores, const std::vector<std::vector<std::ptrdiff_t>>& positions,
                                                 std::ptrdiff_t chunk_length) {
  bool shorter_than_a_chunk = true;
  for (const auto& head : scores) shorter_than_a_chunk = shorter_than_a_chunk && std::ssize(head) < chunk_length;
  std::vector<std::vector<double>> result = scores;
  for (std::size_t h = 0; h < scores.size() && !shorter_than_a_chunk; ++h)
    for (std::size_t i = 0; i < scores[h].size(); ++i) {
      double sum = 0, count = 0;
      for (std::size_t other = 0; other < scores.size(); ++other)
        for (std::size_t j = 0; j < scores[other].size(); ++j)
          if (positions[other][j] / chunk_length == positions[h][i] / chunk_length) sum += scores[other][j], count += 1;
      result[h][i] = sum / count;
    }
  return result;
}

}  // namespace reference
