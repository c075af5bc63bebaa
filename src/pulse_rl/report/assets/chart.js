// A line chart: axes with units, labels at the ends of the curves, a cursor that reads them out.

const LABELS_FROM = 430; // pixels of width from which curves are labelled at their ends; below, in a legend

// Texts of charts, at their boldest.
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
const textWidth = (text) => ruler.measureText(text).width;

function scale(low, high, from, to, log) {
  const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const span = b - a || 1;
  return (value) => from + (((log ? Math.log10(value) : value) - a) / span) * (to - from);
}

function extent(axis, values) {
  const usable = values.filter((v) => Number.isFinite(v) && (!axis.log || v > 0));
  let low = axis.low ?? usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = axis.high ?? usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(low <= high)) [low, high] = axis.log ? [1, 10] : [0, 1];
  if (axis.from0 && !axis.log) low = Math.min(0, low);
  if (axis.log) {
    if (axis.low === undefined) low /= 1.25;
    if (axis.high === undefined) high *= 1.25;
    if (high / low < 3) [low, high] = [low / 1.5, high * 1.5];
  } else if (low === high) {
    const room = Math.abs(low) * 0.5 || 1;
    [low, high] = axis.from0 ? [Math.min(0, low), high + room] : [low - room, high + room];
  } else if (axis.padded) {
    const room = (high - low) * 0.06;
    if (axis.high === undefined) high += room;
    if (axis.low === undefined && low !== 0) low -= room;
  }
  return [low, high];
}

// The plot's frame with both axes drawn: {svg, x, y, left, right, top, bottom}.
function frame(width, height, spec, reservedRight) {
  const all = (key) => spec.series.flatMap((s) => [...(s[key] ?? [])]);
  const [xLow, xHigh] = extent(spec.x, all("xs"));
  const marks = (spec.marks ?? []).filter((m) => m.y !== undefined).map((m) => m.y);
  const [yLow, yHigh] = extent({ padded: true, ...spec.y }, [...all("ys"), ...all("lows"), ...all("highs"), ...marks]);
  const rows = Math.max(3, Math.round(height / 55));
  const yTicks = (spec.y.log ? logTicks : linearTicks)(yLow, yHigh, rows);
  const left = Math.ceil(Math.max(...yTicks.map((t) => textWidth(spec.y.format(t))), 14)) + 8;
  const [top, right, bottom] = [26, width - reservedRight, height - 38];
  const x = scale(xLow, xHigh, left, right, spec.x.log);
  const y = scale(yLow, yHigh, bottom, top, spec.y.log);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.summary });
  for (const tick of yTicks) {
    svg.append(
      shape("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, spec.y.format(tick)),
    );
  }
  svg.append(shape("text", { x: 0, y: 12 }, spec.y.label));
  svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  xTicks(svg, spec.x, x, xLow, xHigh, left, right, bottom);
  svg.append(shape("text", { x: right, y: height - 3, "text-anchor": "end" }, spec.x.label));
  return { svg, x, y, left, right, top, bottom };
}

function xTicks(svg, axis, x, low, high, left, right, bottom) {
  const wanted = Math.max(2, Math.floor((right - left) / (axis.log ? 45 : 85)));
  const ticks = axis.ticks ?? (axis.log ? logTicks : linearTicks)(low, high, wanted);
  const labelled = ticks.filter((t) => !axis.whole || Number.isInteger(t));
  let free = -Infinity;
  for (const tick of labelled) {
    const text = axis.format(tick);
    const half = textWidth(text) / 2;
    svg.append(shape("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }));
    const middle = Math.min(Math.max(x(tick), half), right + 12);
    if (middle - half < free) continue;
    svg.append(shape("text", { x: middle, y: bottom + 17, "text-anchor": "middle" }, text));
    free = middle + half + 6;
  }
}

function path(points, step) {
  return points
    .map(([px, py], i) => {
      const [a, b] = [px.toFixed(1), py.toFixed(1)];
      return i === 0 ? `M${a} ${b}` : step ? `H${a}V${b}` : `L${a} ${b}`;
    })
    .join("");
}

const drawable = (spec, value) => value !== null && Number.isFinite(value) && (!spec.y.log || value > 0);

function drawSeries(spec, f, s) {
  const group = shape("g", { class: s.colour });
  if (s.lows) {
    const there = s.xs.map((v, i) => [f.x(v), f.y(s.highs[i])]);
    const back = s.xs.map((v, i) => [f.x(v), f.y(s.lows[i])]).reverse();
    if (there.length > 1) group.append(shape("path", { class: "area", d: `${path([...there, ...back])}Z` }));
    else for (const [i, v] of s.xs.entries()) {
      const ends = { x1: f.x(v), x2: f.x(v), y1: f.y(s.lows[i]), y2: f.y(s.highs[i]) };
      group.append(shape("line", { class: "curve thin", ...ends }));
    }
  }
  const points = s.xs.map((v, i) => [v, s.ys[i]]).filter(([, v]) => drawable(spec, v)).map(([a, b]) => [f.x(a), f.y(b)]);
  if (s.kind === "dots" && s.lows) {
    // Of a long series the area stands for the dots.
  } else if (s.kind === "dots") {
    const radius = points.length > 400 ? 1.2 : points.length > 80 ? 2 : 3;
    for (const [cx, cy] of points) group.append(shape("circle", { class: "point faint", cx, cy, r: radius }));
  } else if (points.length) {
    const style = ["curve", s.dash ?? "", points.length > 250 || s.thin ? "thin" : ""].join(" ").trim();
    if (points.length > 1) group.append(shape("path", { class: style, d: path(points, s.kind === "step") }));
    const marked = points.length <= 12 && s.kind !== "step" && !s.smooth;
    if (marked) for (const [cx, cy] of points) group.append(shape("circle", { class: "point", cx, cy, r: 3 }));
  }
  f.svg.append(group);
  return points;
}

// Labels at the ends of curves, pushed apart where they would touch.
function endLabels(f, labels) {
  const gap = 15;
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => {
    label.at = Math.max(label.y, i ? labels[i - 1].at + gap : f.top);
  });
  for (let i = labels.length - 1, limit = f.bottom; i >= 0; i--, limit -= gap) {
    labels[i].at = Math.min(labels[i].at, limit);
    limit = Math.min(limit, labels[i].at);
  }
  for (const { name, colour, at } of labels) {
    f.svg.append(shape("g", { class: colour }, shape("text", { class: "tag", x: f.right + 8, y: at + 4 }, name)));
  }
}

// For a rising curve: beside the place where it first reaches the value `labelAt`.
function labelOnCurve(f, s, points) {
  const first = points.findIndex(([, y]) => y <= f.y(s.labelAt));
  const [x, y] = points[first < 0 ? points.length - 1 : first];
  const room = x + 10 + textWidth(s.name) < f.right;
  const text = shape("text", { class: "tag halo", x: x + (room ? 9 : -9), y: y + 4, "text-anchor": room ? "start" : "end" }, s.name);
  f.svg.append(shape("g", { class: s.colour }, text));
}

function legend(series) {
  const items = series.map((s) => {
    const kind = s.kind === "dots" ? "point" : s.kind === "block" ? "bar" : `curve ${s.dash ?? ""}`;
    const sign =
      s.kind === "dots"
        ? shape("circle", { class: kind, cx: 10, cy: 5, r: 3 })
        : s.kind === "block"
          ? shape("rect", { class: kind, x: 4, y: 0, width: 12, height: 10, rx: 2 })
          : shape("path", { class: kind, d: "M0 5H20" });
    const swatch = shape("svg", { class: s.colour, width: 20, height: 10, "aria-hidden": "true" }, sign);
    return element("li", {}, swatch, s.name);
  });
  return element("ul", { class: "legend" }, ...items);
}

function lineChart(spec) {
  return (plot, width) => {
    const named = spec.series.filter((s) => s.name);
    const labelled = width >= LABELS_FROM && named.every((s) => s.kind !== "dots") && named.length <= 9;
    const atEnds = named.filter((s) => s.labelAt === undefined);
    const reserved = labelled ? Math.ceil(Math.max(0, ...atEnds.map((s) => textWidth(s.name) + 14))) : 8;
    if (!labelled && named.length > 1) plot.append(legend(named));
    const f = frame(width, spec.height ?? Math.round(Math.min(270, Math.max(210, width * 0.52))), spec, Math.max(reserved, 14));
    const ends = [];
    for (const s of spec.series) {
      const points = drawSeries(spec, f, s);
      if (!labelled || !s.name || !points.length) continue;
      if (s.labelAt !== undefined) labelOnCurve(f, s, points);
      else ends.push({ name: s.name, colour: s.colour, y: points[points.length - 1][1] });
    }
    for (const mark of spec.marks ?? []) drawMark(f, mark);
    endLabels(f, ends);
    plot.append(f.svg);
    if (spec.cursor !== false) cursor(plot, f, spec);
  };
}

function drawMark(f, { x, y, label }) {
  if (x !== undefined) {
    const at = f.x(x);
    const anchor = at > (f.left + f.right) / 2 ? "end" : "start";
    f.svg.append(shape("line", { class: "mark", x1: at, x2: at, y1: f.top, y2: f.bottom }));
    const place = { x: at + (anchor === "end" ? -5 : 5), y: f.bottom - 6, "text-anchor": anchor };
    f.svg.append(shape("text", { class: "halo", ...place }, label));
  } else {
    f.svg.append(shape("line", { class: "mark", x1: f.left, x2: f.right, y1: f.y(y), y2: f.y(y) }));
    f.svg.append(shape("text", { class: "halo", x: f.left + 4, y: f.y(y) - 5 }, label));
  }
}

// Follows the pointer: a line at the nearest x, and what each named curve is there.
function cursor(plot, f, spec) {
  const named = spec.series.filter((s) => s.xs.length && (s.name || s.read));
  if (!named.length) return;
  const line = shape("line", { class: "cursor", y1: f.top, y2: f.bottom, visibility: "hidden" });
  const readout = element("p", { class: "readout", "aria-hidden": "true" }, " ");
  f.svg.append(line);
  plot.append(readout);
  const longest = named.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
  f.svg.addEventListener("pointermove", (event) => {
    const box = f.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) * f.svg.viewBox.baseVal.width) / box.width;
    const nearest = longest.xs[closest(longest.xs.map(f.x), at)];
    const px = f.x(nearest);
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.setAttribute("visibility", "visible");
    const values = named.map((s) => `${s.name ?? s.read} ${spec.y.format(s.ys[closest(s.xs.map(f.x), px)], true)}`);
    readout.textContent = [`${spec.x.name ?? spec.x.label} ${spec.x.format(nearest)}`, ...values].join(" · ");
  });
  f.svg.addEventListener("pointerleave", () => line.setAttribute("visibility", "hidden"));
}

function closest(places, at) {
  let best = 0;
  for (let i = 1; i < places.length; i++) if (Math.abs(places[i] - at) < Math.abs(places[best] - at)) best = i;
  return best;
}
