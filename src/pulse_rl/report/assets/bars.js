// Stacked bars, dots on rows, and the workers' lanes.

// rows: [{name, total, parts: [{name, value}]}]; `colours` has the colour of each part's name, in the legend's order.
function stackedBars({ rows, colours, format, summary }) {
  return (plot, width) => {
    const longest = Math.max(...rows.map((r) => r.parts.reduce((sum, p) => sum + p.value, 0)), 1e-12);
    const drawn = new Set(rows.flatMap((row) => row.parts.map((part) => part.name)));
    const kinds = Object.entries(colours).filter(([name]) => drawn.has(name));
    plot.append(legend(kinds.map(([name, colour]) => ({ name, colour, kind: "block" }))));
    const pitch = 46;
    const height = rows.length * pitch;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary });
    rows.forEach((row, i) => {
      const top = i * pitch;
      svg.append(shape("text", { class: "strong", x: 0, y: top + 13 }, fitted(row.name, width - textWidth(row.total) - 16)));
      svg.append(shape("text", { x: width, y: top + 13, "text-anchor": "end" }, row.total));
      let x = 0;
      for (const part of row.parts) {
        const length = (part.value / longest) * width;
        const text = format(part.value);
        const group = shape("g", { class: colours[part.name] }, shape("title", {}, `${part.name}: ${text}`));
        group.append(shape("rect", { class: "bar", x, y: top + 19, width: Math.max(0, length - 1), height: 18, rx: 2 }));
        if (length > textWidth(text) + 8) group.append(shape("text", { class: "on", x: x + 5, y: top + 32 }, text));
        svg.append(group);
        x += length;
      }
    });
    plot.append(svg);
  };
}

// One row a name, a dot for each of `dots` ([{name, colour, values}]), on one scale.
function dotRows({ names, dots, axis, summary }) {
  return (plot, width) => {
    plot.append(legend(dots.map((d) => ({ ...d, kind: "dots" }))));
    const values = dots.flatMap((d) => d.values).filter((v) => v !== null);
    const [low, high] = extent({ padded: true, ...axis }, values);
    const left = Math.min(Math.max(...names.map(textWidth)) + 14, width * 0.42);
    const pitch = 24;
    const bottom = names.length * pitch + 4;
    const height = bottom + 38;
    const x = scale(low, high, left + 6, width - 14, axis.log);
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary });
    xTicks(svg, axis, x, low, high, left, width - 14, bottom);
    svg.append(shape("text", { x: width - 14, y: height - 3, "text-anchor": "end" }, axis.label));
    names.forEach((name, i) => {
      const y = i * pitch + pitch / 2;
      const there = dots.map((d) => d.values[i]).filter((v) => v !== null && (!axis.log || v > 0));
      svg.append(shape("text", { class: "strong", x: 0, y: y + 4 }, fitted(name, left - 10)));
      svg.append(shape("line", { class: "axis", x1: left, x2: width - 14, y1: y, y2: y }));
      if (there.length > 1) {
        svg.append(shape("line", { class: "mark", x1: x(Math.min(...there)), x2: x(Math.max(...there)), y1: y, y2: y }));
      }
      for (const d of dots) {
        if (d.values[i] === null || (axis.log && d.values[i] <= 0)) continue;
        const dot = shape("circle", { class: "point", cx: x(d.values[i]), cy: y, r: 5 });
        svg.append(shape("g", { class: d.colour }, shape("title", {}, `${name}, ${d.name}: ${axis.format(d.values[i], true)}`), dot));
      }
    });
    plot.append(svg);
  };
}

function fitted(text, room) {
  if (textWidth(text) <= room) return text;
  let length = Math.floor((text.length * room) / textWidth(text));
  while (length > 1 && textWidth(`${text.slice(0, length)}…`) > room) length--;
  return `${text.slice(0, length)}…`;
}

// A lane a worker: how many versions it is behind as a step curve, and below it a strip with its syncs.
function lanes({ workers, until, summary }) {
  return (plot, width) => {
    const [lane, gap, strip] = [34, 50, 9];
    const pitch = lane + gap;
    const height = workers.length * pitch + 26;
    const highest = Math.max(1, ...workers.flatMap((w) => w.behind.highs ?? w.behind.ys));
    const left = Math.ceil(textWidth(whole(highest))) + 8;
    const x = scale(0, until || 1, left, width - 2, false);
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary });
    workers.forEach((worker, i) => {
      const top = i * pitch + 26;
      const base = top + lane;
      const y = scale(0, highest, base, top, false);
      const facts = `median lag ${seconds(worker.lag_seconds)}, at worst ${plural(worker.worst_behind, "version")} behind`;
      svg.append(shape("text", { class: "strong", x: 0, y: top - 11 }, fitted(worker.name, width * 0.3)));
      svg.append(shape("text", { x: width - 2, y: top - 11, "text-anchor": "end" }, width > 420 ? facts : facts.replace("median ", "").replace("at worst ", "≤ ").replace(" behind", "")));
      for (const tick of [0, highest]) {
        svg.append(shape("line", { class: "axis", x1: left, x2: width - 2, y1: y(tick), y2: y(tick) }));
        svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, whole(tick)));
      }
      const most = worker.behind.highs ?? worker.behind.ys;
      const points = worker.behind.xs.map((t, j) => [x(t), y(most[j])]);
      if (points.length) points.push([x(until), points[points.length - 1][1]]);
      const curve = path(points, true);
      const group = shape("g", { class: "orange" });
      if (curve) {
        group.append(shape("path", { class: "area", d: `${curve}V${base}H${points[0][0].toFixed(1)}Z` }));
        group.append(shape("path", { class: "curve thin", d: curve }));
      }
      const syncs = shape("g", { class: "blue" });
      for (const [start, length, share] of worker.busy) {
        const from = x(Math.max(0, start));
        const place = { x: from, width: Math.max(1, x(start + length) - from), y: base + 6 + strip * (1 - share), height: strip * share };
        syncs.append(shape("rect", { class: "bar", ...place }));
      }
      svg.append(group, syncs);
    });
    const axis = { format: seconds };
    xTicks(svg, axis, x, 0, until || 1, left, width - 2, height - 26);
    plot.append(
      legend([
        { name: "versions behind", colour: "orange" },
        { name: "fetching, verifying, applying", colour: "blue", kind: "block" },
      ]),
      svg,
    );
  };
}

const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;
