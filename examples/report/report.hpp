// The report: one HTML page that draws a recording and figures of quality, needs no network, and holds its own data.
#pragma once

#include <ostream>
#include <span>

#include "page.hpp"
#include "quality.hpp"
#include "recording.hpp"
#include "script.hpp"

namespace toy {

/// Write the page. The figures in it are those of quality_json(points).
/// @param recording  null, or without a step: no pictures of the cache
/// @param points     empty: no picture of quality
inline void write_report(std::ostream& out, const Recording* recording, std::span<const QualityPoint> points = {}) {
  out << detail::page_start << detail::page_style << detail::page_body << "<script type=\"application/json\" id=\"data\">\n{\"recording\": "
      << (recording == nullptr || recording->steps.empty() ? "null" : recording_json(*recording)) << ",\n\"quality\": " << quality_json(points)
      << "}\n</script>\n<script>\n" << detail::page_script << "</script>\n" << detail::page_end;
}

}  // namespace toy
