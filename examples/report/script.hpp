// What draws the pictures from the page's data, in the browser.
#pragma once

namespace toy::detail {

inline constexpr const char* page_script = R"js("use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const range = count => Array.from({length: count}, (_, i) => i);
const percent = share => (100 * share).toFixed(1) + " %";

function element(name, attributes = {}, children = []) {
  const inSvg = ["svg", "g", "path", "rect", "line", "text", "title", "desc"].includes(name);
  const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[].concat(children));
  return made;
}
const line = (x1, y1, x2, y2, kind) => element("line", {x1, y1, x2, y2, class: kind});
const label = (x, y, anchor, text) => element("text", {x, y, "text-anchor": anchor}, text);

/// A picture that a screen reader announces by its title and description.
function picture(height, title, description, children) {
  return element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title + ". " + description}, children);
}
/// columns: [heading, isText]; rows: arrays of cells.
function table(caption, columns, rows) {
  const cells = (name, row) => element("tr", {}, row.map((cell, i) =>
    element(i === 0 && name === "td" ? "th" : name, {class: columns[i][1] ? "text" : "", ...(name === "th" ? {scope: "col"} : i === 0 ? {scope: "row"} : {})}, String(cell))));
  return element("table", {}, [element("caption", {}, caption), element("thead", {}, cells("th", columns.map(column => column[0]))),
    element("tbody", {}, rows.map(row => cells("td", row)))]);
}
/// Draws its table only while it is open: most never are.
function tableIn(details, make) {
  const fill = () => details.open && details.querySelector(".scroll").replaceChildren(make());
  details.addEventListener("toggle", fill);
  return fill;
}

const width = 960, left = 56, right = 16;

// --- what the cache held

/// entered[position]: the step that read it. gone[head][position]: the step after which it is no longer held.
function unpack(recording) {
  const heads = recording.layers * recording.kv_heads, tokens = recording.tokens.length;
  const entered = [], gone = range(heads).map(() => new Float64Array(tokens).fill(Infinity));
  recording.steps.forEach((step, s) => {
    for (let i = 0; i < step.new; ++i) entered.push(s);
    step.gone.forEach((ranges, head) => {
      for (const positions of ranges.split(" ").filter(Boolean)) {
        const [first, last = first] = positions.split("-").map(Number);
        gone[head].fill(s, first, last + 1);
      }
    });
  });
  return {entered, gone};
}

function showRecording(recording) {
  const {entered, gone} = unpack(recording);
  const steps = recording.steps.length, tokens = entered.length;
  const seen = recording.steps.reduce((sums, step) => [...sums, (sums[sums.length - 1] || 0) + step.new], []);
  const hasWeights = recording.steps.every(step => step.weights.length > 0);
  const slider = byId("step"), layers = byId("layer"), kvHeads = byId("head"), words = byId("words");

  const options = (all, count) => ["all", ...range(count)].map(i => element("option", {value: i}, i === "all" ? all : String(i)));
  layers.append(...options("all layers", recording.layers));
  kvHeads.append(...options("all heads", recording.kv_heads));
  slider.max = steps - 1;
  slider.value = steps - 1;  // past the old maximum it would have been cut
  byId("recording").hidden = false;
  byId("attention-section").hidden = !hasWeights;

  const nameOf = position => recording.tokens[position].replace(/[\x00-\x1f]/g, c => c === "\n" ? "\u21b5" : String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\x7f/g, "\u2421");
  const spans = range(tokens).map(position => element("span", {}, nameOf(position) + (recording.tokens[position].endsWith("\n") ? "\n" : "")));
  words.append(...spans);

  let step, heads, whose;  // what is chosen
  const choose = () => {
    step = Number(slider.value);
    const chosen = (select, count) => select.value === "all" ? range(count) : [Number(select.value)];
    heads = chosen(layers, recording.layers).flatMap(layer => chosen(kvHeads, recording.kv_heads).map(head => layer * recording.kv_heads + head));
    whose = (layers.value === "all" ? "all layers" : "layer " + layers.value) + ", " + (kvHeads.value === "all" ? "all heads" : "kv_head " + kvHeads.value);
  };
  const holders = (position, s) => entered[position] > s ? 0 : heads.filter(head => gone[head][position] > s).length;
  const x = position => left + position * (width - left - right) / tokens;
  const positionAxis = (y, count) => [line(left, y, width - right, y, "axis"), ...ticks(0, tokens - 1, 10).filter(Number.isInteger).map(p => label(x(p + 0.5), y + 16, "middle", p)),
    label(width - right, y + 32, "end", "position")];
  const stepName = s => {
    const first = seen[s] - recording.steps[s].new;
    return `step ${s}: reads ` + (seen[s] - first === 1 ? `position ${first}, \u201c${nameOf(first)}\u201d` : `positions ${first} to ${seen[s] - 1}`);
  };

  function drawWords() {
    spans.forEach((span, position) => {
      const n = holders(position, step), unread = entered[position] > step;
      span.style.setProperty("--share", n / heads.length);
      span.className = unread ? "unread" : (n > 0 ? "held" : "") + (entered[position] === step ? " new" : "");
      span.dataset.held = n;
      span.title = `position ${position}: held by ${n} of ${heads.length}`;
    });
  }
  const fillWords = tableIn(byId("words-details"), () => table(`After step ${step}, ${whose}`, [["position"], ["token", true], ["read in step"], ["held by, of " + heads.length]],
    range(seen[step]).map(p => [p, nameOf(p), entered[p], holders(p, step)])));

  let marker;
  const top = 8, mapHeight = Math.min(Math.max(steps * 6, 60), 420), y = s => top + s * mapHeight / steps;
  function drawMap() {
    const shapes = range(heads.length + 1).map(() => "");  // by how many heads hold
    for (let p = 0; p < tokens; ++p) {
      const ends = heads.map(head => Math.min(gone[head][p], steps)).sort((a, b) => a - b);
      let from = entered[p];
      ends.forEach((end, i) => {
        if (end > from) shapes[heads.length - i] += `M${x(p).toFixed(1)} ${y(from).toFixed(1)}H${x(p + 1).toFixed(1)}V${y(end).toFixed(1)}H${x(p).toFixed(1)}Z`;
        from = Math.max(from, end);
      });
    }
    marker = element("g", {});
    const children = shapes.map((d, n) => element("path", {d, class: "kept", "fill-opacity": n / heads.length, "shape-rendering": "crispEdges"})).slice(1);
    const drawn = picture(mapHeight + 50, `Retention map of ${whose}`, `Positions 0 to ${tokens - 1} across, steps 0 to ${steps - 1} down`,
      [...children, ...positionAxis(top + mapHeight, tokens), line(left, top, left, top + mapHeight, "axis"),
        ...ticks(0, steps - 1, Math.max(mapHeight / 50, 2)).filter(Number.isInteger).map(s => label(left - 14, y(s + 0.5) + 4, "end", s)),
        element("text", {transform: `translate(12 ${top + mapHeight / 2}) rotate(-90)`, "text-anchor": "middle"}, "step"), marker]);
    drawn.addEventListener("click", event => {
      const box = drawn.getBoundingClientRect(), s = Math.floor(((event.clientY - box.top) * width / box.width - top) * steps / mapHeight);
      if (s >= 0 && s < steps) slider.value = s, draw();
    });
    byId("map").replaceChildren(drawn);
    byId("map-legend").textContent = heads.length === 1 ? "" : `The fewer of the ${heads.length} chosen heads hold it, the paler.`;
  }
  function markStep() {
    const at = y(step + 0.5);
    marker.replaceChildren(line(left, at, width - right, at, "now"), element("path", {d: `M${left} ${at}l-10 -6v12Z`, class: "now-mark"}));
  }
  const fillMap = tableIn(byId("map-details"), () => table(`Of ${whose}: the step that evicts a position; blank: held to the end`,
    [["position"], ["token", true], ["read in step"], ["first head evicts it in"], ["last head evicts it in"], ["heads that hold it at the end, of " + heads.length]],
    range(tokens).map(p => {
      const ends = heads.map(head => gone[head][p]), first = Math.min(...ends), last = Math.max(...ends);
      return [p, nameOf(p), entered[p], first < Infinity ? first : "", last < Infinity ? last : "", holders(p, steps - 1)];
    })));

  /// By position, mean over the heads chosen. Digits of base 62, in units of 1/1000, 'z' before two of them; of the positions held before the step.
  function weights() {
    const digit = c => c <= 57 ? c - 48 : c <= 90 ? c - 55 : c - 61, mean = new Float64Array(seen[step]);
    for (const head of heads) {
      const code = recording.steps[step].weights[head];
      for (let p = 0, at = 0; p < seen[step]; ++p) {
        if (gone[head][p] < step) continue;
        let units = digit(code.charCodeAt(at++));
        if (units === 61) units = 62 * digit(code.charCodeAt(at++)) + digit(code.charCodeAt(at++));
        mean[p] += units / 1000 / heads.length;
      }
    }
    return mean;
  }
  function drawAttention() {
    if (!hasWeights) return;
    const mean = weights(), most = Math.max(...mean, 0.01), height = 160;
    const y = weight => top + height * (1 - Math.sqrt(weight / most)), strip = top + height + 6;
    const bar = Math.min(Math.max((x(1) - x(0)) * 0.8, 1), 24);
    const bars = [...mean].map((weight, p) => weight > 0 ? `M${x(p + 0.5).toFixed(1)} ${y(0)}V${y(weight).toFixed(1)}` : "").join("");
    const shown = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1].filter(weight => weight <= most && Math.sqrt(weight / most) > 0.05);
    const held = range(seen[step]).map(p => [p, holders(p, step)]).filter(([, n]) => n > 0);
    byId("attention").replaceChildren(picture(height + 70, `Attention weights of ${whose} in step ${step}`,
      `Greatest: ${percent(Math.max(...mean))} for position ${mean.indexOf(Math.max(...mean))}`,
      [...shown.flatMap(weight => [line(left, y(weight), width - right, y(weight), "grid"), label(left - 8, y(weight) + 4, "end", 100 * weight + " %")]),
        element("path", {d: bars, class: "bar", "stroke-width": bar.toFixed(1)}),
        ...held.map(([p, n]) => element("rect", {x: x(p).toFixed(1), y: strip, width: (x(p + 1) - x(p)).toFixed(1), height: 8, class: "kept", "fill-opacity": n / heads.length})),
        label(left - 8, strip + 8, "end", "held"), ...positionAxis(strip + 12, tokens)]));
  }
  const fillAttention = tableIn(byId("attention-details"), () => {
    const mean = weights();
    return table(`Step ${step}, ${whose}; positions with less than 0.05 % are left out`, [["position"], ["token", true], ["weight"], ["held by after the step, of " + heads.length]],
      range(seen[step]).filter(p => mean[p] >= 0.0005).map(p => [p, nameOf(p), percent(mean[p]), holders(p, step)]));
  });

  /// What depends on the step; `chosen` if other heads were chosen as well.
  function draw(chosen) {
    choose();
    drawWords(), fillWords();
    if (chosen) drawMap(), fillMap();
    markStep(), drawAttention(), fillAttention();
    slider.setAttribute("aria-valuetext", stepName(step));
    const held = heads.map(head => range(seen[step]).filter(p => gone[head][p] > step).length), least = Math.min(...held), most = Math.max(...held);
    byId("summary").textContent = `${stepName(step)}. Held of ${seen[step]}: ${least === most ? most : least + " to " + most}${heads.length > 1 ? " a head" : ""}.`;
  }
  slider.addEventListener("input", () => draw());
  layers.addEventListener("change", () => draw(true));
  kvHeads.addEventListener("change", () => draw(true));

  let timer;
  const pause = () => { clearInterval(timer), timer = undefined, byId("play").textContent = "Play"; };
  byId("play").addEventListener("click", () => {
    if (timer !== undefined) return pause();
    if (step === steps - 1) slider.value = 0, draw();
    byId("play").textContent = "Pause";
    timer = setInterval(() => {
      if (step >= steps - 1) return pause();
      slider.value = step + 1, draw();
    }, Math.max(40, Math.min(250, 15000 / steps)));
  });
  draw(true);
}

// --- quality

/// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const raw = Math.max(high - low, 1e-9) / count, power = 10 ** Math.floor(Math.log10(raw)), unit = [1, 2, 5, 10].find(u => u * power >= raw) * power;
  const first = Math.ceil(low / unit - 1e-9);
  return range(Math.max(Math.floor(high / unit + 1e-9) - first + 1, 0)).map(i => Number(((first + i) * unit).toPrecision(12)));
}
function humanBytes(bytes) {
  const unit = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 4);
  return Number((bytes / 1024 ** unit).toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
const markers = ["M-4 -4H4V4H-4Z", "M0 -5L5 4H-5Z", "M0 -6L6 0L0 6L-6 0Z", "M0 5L5 -4H-5Z", "M-4.5 0A4.5 4.5 0 1 0 4.5 0A4.5 4.5 0 1 0 -4.5 0Z", "M-5 -2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z"];
const dashes = ["", "6 3", "2 3"];

function chart(measure, points, policies) {
  const full = points.find(point => point.policy === "full");
  const names = policies.filter(policy => points.some(point => point.policy === policy));
  const height = Math.max(300, 16 * names.length + 90), top = 12, bottom = height - 52, edge = width - 300;
  const bytes = points.map(point => Math.log2(point.bytes)), least = Math.min(...bytes), most = Math.max(...bytes);
  const x = b => left + 16 + (Math.log2(b) - least) / Math.max(most - least, 1e-9) * (edge - left - 32);
  const values = points.flatMap(point => [point.value, point.low, point.high]).filter(Number.isFinite);
  let low = Math.min(...values), high = Math.max(...values);
  const logarithmic = low > 0 && high / low > 5 && points[0].better === "lower", scale = logarithmic ? Math.log10 : value => value;
  if (!(high > low)) low -= 0.5, high += 0.5;
  const y = value => bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (bottom - top);
  const yTicks = logarithmic ? range(12).flatMap(e => [1, 2, 5].map(u => u * 10 ** (e - 4))).filter(v => v >= low && v <= high) : ticks(low, high, 6);

  const labels = names.map(policy => {
    const own = points.filter(point => point.policy === policy).sort((a, b) => a.bytes - b.bytes);
    return {policy, own, at: y(own[own.length - 1].value)};
  }).sort((a, b) => a.at - b.at);
  labels.forEach((entry, i) => entry.y = Math.max(entry.at, i === 0 ? top : labels[i - 1].y + 16));
  for (let i = labels.length - 1, limit = bottom; i >= 0; --i, limit -= 16) labels[i].y = Math.min(labels[i].y, limit);

  const xTicks = range(Math.floor(most) - Math.ceil(least) + 1).map(i => 2 ** (Math.ceil(least) + i));
  const series = labels.map(({policy, own, at, y: labelY}) => {
    const number = policies.indexOf(policy), last = own[own.length - 1];
    return element("g", {class: "series", "data-policy": policy}, [
      ...(policy === "full" ? [] : [element("path", {d: own.map((point, i) => `${i ? "L" : "M"}${x(point.bytes)} ${y(point.value)}`).join(""), "stroke-dasharray": dashes[number % 3]})]),
      ...own.filter(point => Number.isFinite(point.low) && Number.isFinite(point.high)).map(point =>
        element("path", {class: "interval", d: `M${x(point.bytes) - 4} ${y(point.low)}h8m-4 0V${y(point.high)}m-4 0h8`})),
      ...own.map(point => element("path", {class: "marker", d: markers[number % 6], transform: `translate(${x(point.bytes)} ${y(point.value)})`},
        element("title", {}, `${policy}, budget ${point.budget}: ${point.value}`))),
      line(policy === "full" ? edge : x(last.bytes) + 6, at, edge + 18, labelY, "leader"),
      element("path", {class: "marker", d: markers[number % 6], transform: `translate(${edge + 26} ${labelY})`}),
      element("text", {x: edge + 38, y: labelY + 4, class: "name"}, policy.length > 38 ? policy.slice(0, 37) + "\u2026" : policy)]);
  });
  const drawn = picture(height, `${measure} against bytes held`, `${names.length} policies; ${points[0].better} is better`,
    [...yTicks.flatMap(value => [line(left, y(value), edge, y(value), "grid"), label(left - 8, y(value) + 4, "end", value)]),
      line(left, bottom, edge, bottom, "axis"), line(left, top, left, bottom, "axis"), ...xTicks.map(b => label(x(b), bottom + 18, "middle", humanBytes(b))),
      label((left + edge) / 2, bottom + 38, "middle", "keys and values held"), ...(full ? [line(left, y(full.value), edge, y(full.value), "full")] : []), ...series]);
  const interval = point => Number.isFinite(point.low) && Number.isFinite(point.high) ? `${point.low} to ${point.high}` : "";
  const details = element("details", {}, [element("summary", {}, "The same as a table"),
    element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of " + measure}, table(measure, [["policy", true], ["budget"], ["bytes"], ["value"], ["95 % interval"]],
      points.map(point => [point.policy, point.budget, point.bytes, point.value, interval(point)])))]);
  return element("div", {class: "chart"}, [element("h3", {}, `${measure} (${points[0].better} is better)`), drawn, details]);
}

function showQuality(points) {
  const policies = [...new Set(points.map(point => point.policy))], select = byId("policy");
  select.append(...policies.map(policy => element("option", {value: policy}, policy)));
  select.value = policies.find(policy => policy !== "full") || policies[0];
  byId("charts").append(...[...new Set(points.map(point => point.measure))].map(measure => chart(measure, points.filter(point => point.measure === measure), policies)));
  const mark = () => {
    for (const series of document.querySelectorAll(".series")) {
      const chosen = series.dataset.policy === select.value;
      series.classList.toggle("chosen", chosen);
      if (chosen) series.parentNode.append(series);  // on top
    }
  };
  select.addEventListener("change", mark);
  byId("quality").hidden = false;
  mark();
}

/// Opened with #selftest the page moves its own controls, as tests/report_in_browser.cmake wants it to, says how that went, and
/// stays with step 1 of all heads, its tables open.
function selfTest() {
  const problems = [], expect = (holds, what) => holds || problems.push(what), set = (control, value, event) => {
    control.value = value, control.dispatchEvent(new Event(event));
  };
  if (data.recording) {
    const heldNow = () => [...document.querySelectorAll("#words span")].map(span => span.dataset.held).join(), slider = byId("step");
    expect(document.querySelectorAll("#map svg path").length > 0, "the map is empty");
    expect(Number(slider.value) === data.recording.steps.length - 1, "the slider does not begin at the end");
    const last = heldNow(), summary = byId("summary").textContent;
    set(slider, 0, "input");
    expect(heldNow() !== last && byId("summary").textContent !== summary, "the slider changes nothing");
    expect(document.querySelectorAll("#words .unread").length > 0, "nothing is unread at the start");
    const all = byId("map").innerHTML;
    set(byId("layer"), 0, "change"), set(byId("head"), 0, "change");
    expect(byId("map").innerHTML !== all, "choosing a head changes nothing");
    set(byId("layer"), "all", "change"), set(byId("head"), "all", "change");
    expect(byId("map").innerHTML === all, "choosing all heads again does not bring the first map back");
    set(slider, 1, "input");
    for (const details of document.querySelectorAll("#recording section:not([hidden]) details")) {
      details.open = true, details.dispatchEvent(new Event("toggle"));
      expect(details.querySelectorAll("tbody tr").length > 0, `no table in ${details.id}`);
    }
  }
  if (data.quality.length > 0) {
    const measures = new Set(data.quality.map(point => point.measure)), rows = document.querySelectorAll("#charts tbody tr"), select = byId("policy");
    expect(document.querySelectorAll("#charts svg").length === measures.size, "not one chart a measure");
    expect(document.querySelectorAll("#charts .full").length === measures.size, "not one line of the full cache a chart");
    expect(document.querySelectorAll("#charts .series > .marker[d] title").length === data.quality.length, "not one marker a point");
    expect(rows.length === data.quality.length, "not one row a point");
    for (const option of select.options) {
      set(select, option.value, "change");
      expect([...document.querySelectorAll(".series.chosen")].every(series => series.dataset.policy === option.value), "another policy is marked than chosen");
      expect(document.querySelectorAll(".series.chosen").length > 0, "the chosen policy is not marked");
    }
  }
  expect(document.querySelectorAll("svg:not([aria-label])").length === 0, "a picture has no name");
  document.documentElement.dataset.selftest = problems.length === 0 ? "ok" : problems.join("; ");
}

if (data.recording) {
  byId("facts").append(...data.recording.facts.map(([name, value]) => element("div", {}, [element("dt", {}, name), element("dd", {}, value)])));
  showRecording(data.recording);
}
if (data.quality.length > 0) showQuality(data.quality);
if (location.hash === "#selftest") selfTest();
)js";

}  // namespace toy::detail
