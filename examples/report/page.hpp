// The page around the pictures. Every picture has its table; colours are those of the reader's light or dark scheme, and
// nothing is said by colour alone.
#pragma once

namespace toy::detail {

inline constexpr const char* page_start = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What the cache keeps</title>
)";

inline constexpr const char* page_style = R"css(<style>
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #59636e; --page: #ffffff; --panel: #f4f6f8; --line: #cfd6dd; --hold: #a9cdfb;
  --accent: #0a58ad; --focus: #b35900; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #9aa5b1; --page: #0f1318; --panel: #181d24; --line: #37404a; --hold: #1d4e89; --accent: #7db4ff; --focus: #ffb454; }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 66rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; color: var(--muted); }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.75rem; margin: .5rem 0 1rem; }
dt { color: var(--muted); font-size: .85rem; }
dd { margin: 0; font-weight: 600; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; border-radius: 3px; }
#controls { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; padding: .6rem .8rem;
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
#controls label { display: flex; gap: .5rem; align-items: center; }
#controls label.wide { flex: 1 1 18rem; }
#controls input { flex: 1; min-width: 8rem; accent-color: var(--accent); }
#controls output { flex: 1 0 100%; font-variant-numeric: tabular-nums; }
button, select { font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--line); border-radius: 5px; padding: .15rem .5rem; }
button { min-width: 4.5rem; }
#words { padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 8px; line-height: 2; white-space: pre-wrap; overflow-wrap: anywhere; }
#words span { color: var(--muted); border-bottom: 3px solid transparent; padding: .1rem 0;
  background: linear-gradient(to top, var(--hold) calc(var(--share) * 100%), transparent 0); }
#words span.held { color: var(--ink); border-bottom-color: var(--accent); }
#words span.new { outline: 2px dashed var(--focus); outline-offset: 1px; }
#words span.unread { visibility: hidden; }
#map, #attention, .chart { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--muted); font-size: 12px; }
svg text.name { fill: var(--ink); }
.axis { stroke: var(--line); fill: none; }
.grid { stroke: var(--line); stroke-dasharray: 2 4; fill: none; }
.kept { fill: var(--accent); }
.bar { stroke: var(--accent); fill: none; }
.now { stroke: var(--focus); stroke-width: 2; fill: none; }
.now-mark { fill: var(--focus); }
.full { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 8 4; fill: none; }
.series path { stroke: var(--muted); stroke-width: 1.5; fill: none; }
.series .marker { fill: var(--page); stroke: var(--muted); stroke-width: 1.5; }
.series .leader { stroke: var(--line); stroke-width: 1; }
.series .interval { display: none; }
.series.chosen path, .series.chosen .marker { stroke: var(--accent); stroke-width: 3; }
.series.chosen .interval { display: inline; stroke-width: 2; }
.series.chosen text { font-weight: 700; fill: var(--ink); }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--accent); width: max-content; }
.scroll { max-height: 22rem; overflow: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; padding: .4rem .7rem; color: var(--muted); }
th, td { padding: .2rem .7rem; text-align: right; border-top: 1px solid var(--line); white-space: pre; }
th.text, td.text { text-align: left; }
thead th { position: sticky; top: 0; background: var(--panel); }
@media (forced-colors: active) { .kept { fill: CanvasText; } .bar, .series path { stroke: CanvasText; } #words span.held { border-bottom-color: Highlight; } }
</style>
</head>
)css";

inline constexpr const char* page_body = R"(<body>
<main>
<h1>What the cache keeps</h1>
<noscript><p>The pictures are drawn by a script in this page; without one there is only its data.</p></noscript>
<dl id="facts"></dl>

<div id="recording" hidden>
<div id="controls" role="group" aria-label="What the pictures show">
<button type="button" id="play">Play</button>
<label class="wide">Step <input type="range" id="step" min="0" value="0"></label>
<label>Layer <select id="layer"></select></label>
<label>kv_head <select id="head"></select></label>
<output id="summary" for="step layer head"></output>
</div>

<section aria-labelledby="words-title">
<h2 id="words-title">The text, and what of it is still held</h2>
<p>A token is underlined and filled while its key and value are in the cache; the more of the chosen heads hold it, the higher the fill. Grey text is
forgotten. A dashed frame marks what the step has just read.</p>
<div id="words"></div>
<details id="words-details"><summary>The same as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Table of tokens"></div></details>
</section>

<section aria-labelledby="map-title">
<h2 id="map-title">Retention map</h2>
<p>Each column is a position of the text, time runs down: a column ends where its token is evicted. <span id="map-legend"></span> The line marks the
step chosen above; a click chooses another.</p>
<div id="map"></div>
<details id="map-details"><summary>The same as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Table of evictions"></div></details>
</section>

<section aria-labelledby="attention-title" id="attention-section">
<h2 id="attention-title">Attention weights</h2>
<p>What the step's last query gave each position, the mean over its query heads (and over the heads chosen), rounded to 0.1 %. The scale is that of square
roots, so that small weights can be seen. The strip below shows which positions are held after the step.</p>
<div id="attention"></div>
<details id="attention-details"><summary>The same as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Table of attention weights"></div></details>
</section>
</div>

<section id="quality" aria-labelledby="quality-title" hidden>
<h2 id="quality-title">Quality against bytes</h2>
<p>Each line is a policy at several budgets, against the bytes of keys and values it held; the full cache is the dashed line. The chosen policy is drawn
thick, with the 95 % confidence interval of each figure; the table has all.</p>
<label>Policy <select id="policy"></select></label>
<div id="charts"></div>
</section>
</main>
)";

inline constexpr const char* page_end = R"(</body>
</html>
)";

}  // namespace toy::detail
