// The study: sparsity by k, by layer type, by exponent against theory, and what a change costs.

function drawStudy(study) {
  const lead = [study.source, `${count(study.parameters)} parameters in ${study.dtype}`, plural(study.states, "state")];
  if (study.lr !== null) lead.push(`learning rate ${study.lr.toExponential()}`);
  if (study.gradient_density !== null) lead.push(`gradient density ${percent(study.gradient_density)}`);
  const grid = section("The study", `${lead.join(", ")}.`);
  drawByK(grid, study);
  drawCost(grid, study);
  if (study.history) drawHistory(grid, study.history);
  if (study.quantised) drawQuantised(grid, study);
  if (study.layers.length) drawLayers(grid, study);
  if (study.exponents.length) drawExponents(grid, study);
  if (study.over_time.xs.length > 1) drawOverTime(grid, study);
  if (study.tensors.length) drawTensors(grid, study);
}

const column = (rows, key) => rows.map((row) => row[key]);
const known = (rows, key) => rows.filter((row) => row[key] !== null);

function kAxis(rows) {
  const ks = column(rows, "k");
  return { label: "k, states apart", name: "k =", format: whole, log: true, low: ks[0], high: Math.max(ks[ks.length - 1], ks[0] * 2), ticks: ks };
}

function drawByK(grid, { rows }) {
  const ks = column(rows, "k");
  const columns = ["k", "pairs", "sparsity", "lowest", "highest", "untouched in between"];
  const cells = rows.map((r) => [whole(r.k), whole(r.pairs), ...["sparsity", "sparsity_min", "sparsity_max", "untouched"].map((key) => percent(r[key]))]);
  const spec = {
    x: kAxis(rows),
    y: { label: "share of weights", format: percent },
    series: [
      { name: "sparsity", colour: "blue", xs: ks, ys: column(rows, "sparsity"), lows: column(rows, "sparsity_min"), highs: column(rows, "sparsity_max") },
      { name: "untouched", colour: "grey", dash: "dash", xs: known(rows, "untouched").map((r) => r.k), ys: column(known(rows, "untouched"), "untouched") },
    ],
    summary: `Sparsity by k: ${rows.map((r) => `${r.k}: ${percent(r.sparsity)}`).join(", ")}.`,
  };
  const note = "Weights with the same bits in two states k apart (area: lowest to highest pair); “untouched” did not change in between either.";
  figure(grid, { title: "Sparsity by k", note, table: { columns, rows: cells } }, lineChart(spec));
}

function drawCost(grid, { rows }) {
  const lines = [["zstd", "bytes_per_changed_zstd", "orange", "dot"], ["auto", "bytes_per_changed", "blue", ""], ["entropy bound", "entropy_bound", "grey", "dash"]];
  const series = lines.map(([name, key, colour, dash]) => ({ name, colour, dash, xs: column(known(rows, key), "k"), ys: column(known(rows, key), key) }));
  const drawn = series.filter((s) => s.xs.length);
  if (!drawn.length) return;
  const keys = ["bytes", "bytes_per_changed", "bytes_per_changed_zstd", "entropy_bound", "times_bound"];
  const cells = rows.map((r) => [whole(r.k), bytes(r.bytes), ...keys.slice(1).map((key) => plain(r[key]))]);
  const spec = {
    x: kAxis(rows),
    y: { label: "bytes a changed weight", format: plain, from0: true },
    series: drawn,
    summary: `Bytes a changed weight: ${drawn.map((s) => `${s.name} ${plain(s.ys[0])}`).join(", ")} at k = ${rows[0].k}.`,
  };
  const table = { columns: ["k", "patch", "auto", "zstd", "entropy bound", "auto / bound"], rows: cells };
  figure(grid, { title: "Cost of a change", note: "Both codecs, and the order-0 entropy given tensor and old exponent.", table }, lineChart(spec));
}

function drawHistory(grid, history) {
  const ages = history.ages.map((a) => (a.to === null ? `${a.from} and more` : a.from === a.to ? `${a.from}` : `${a.from} to ${a.to}`));
  const names = [...ages, "not yet"];
  const values = [...column(history.ages, "share"), history.not_yet];
  const note =
    `Of what changed, the share that had last changed so many states ago; within 8: ${percent(history.within_8)}. ` +
    `Bytes a change without and with history: bound ${plain(history.entropy_bound)} and ${plain(history.entropy_bound_with_history)}, ` +
    `without history ${plain(history.bytes_per_changed_auto)} and with history ${plain(history.bytes_per_changed_history)}.`;
  const table = { columns: ["states ago", "share of changes"], rows: names.map((name, i) => [name, percent(values[i])]) };
  const summary = `Recurrence: ${names.map((name, i) => `${name} ${percent(values[i])}`).join(", ")}.`;
  const dots = [{ name: plural(history.steps, "step"), colour: "blue", values }];
  figure(grid, { title: "Recurrence by age", note, table }, dotRows({ names, dots, axis: { label: "share of changes", format: percent, from0: true }, summary }));
}

function drawQuantised(grid, { rows, dtype, quantised }) {
  const kinds = [...new Set(column(quantised.kinds, "kind"))];
  const changed = (kind, k) => quantised.kinds.find((each) => each.kind === kind && each.k === k);
  const cells = quantised.rows.map(({ k, bytes: patch }) => {
    const before = rows.find((row) => row.k === k);
    const shares = kinds.map((kind) => (changed(kind, k) ? percent(1 - changed(kind, k).sparsity) : "–"));
    const known = patch && before && before.bytes;
    return [`${k}`, before ? percent(1 - before.sparsity) : "–", ...shares, known ? bytes(patch) : "–", known ? rounded(before.bytes / patch) : "–"];
  });
  const title = `Quantised, beside ${dtype}`;
  const columns = ["k", `${dtype}: density`, ...kinds.map((kind) => `quantised: ${kind}`), "patch, quantised", "times smaller"];
  const box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${title}` }, htmlTable({ columns, rows: cells }));
  const note = "What changes of each kind of tensor when the same states are quantised, and a patch of it.";
  grid.append(element("figure", { class: "wide" }, element("h3", {}, title), element("p", { class: "note" }, note), box));
}

function drawLayers(grid, { layers }) {
  const names = [...new Set(column(layers, "layer"))];
  const ks = [...new Set(column(layers, "k"))].sort((a, b) => a - b);
  const shown = ks.length > 1 ? [ks[0], ks[ks.length - 1]] : ks;
  const at = (name, k) => layers.find((l) => l.layer === name && l.k === k);
  const dots = shown.map((k, i) => ({
    name: `k = ${k}`, colour: ["blue", "orange"][i],
    values: names.map((name) => (at(name, k) ? 1 - at(name, k).sparsity : null)),
  }));
  const order = names.map((_, i) => i).sort((a, b) => (dots[0].values[b] ?? 0) - (dots[0].values[a] ?? 0));
  const sorted = dots.map((d) => ({ ...d, values: order.map((i) => d.values[i]) }));
  const ranked = order.map((i) => names[i]);
  const rows = ranked.map((name) => [name, ...ks.map((k) => (at(name, k) ? percent(at(name, k).sparsity) : "–"))]);
  const note = "Weights that changed, by type of layer, the highest density first.";
  const table = { columns: ["layer", ...ks.map((k) => `sparsity at k = ${k}`)], rows };
  const summary = `Density at k = ${ks[0]}: ${ranked.map((name, i) => `${name} ${percent(sorted[0].values[i])}`).join(", ")}.`;
  figure(grid, { title: "Density by layer type", note, table }, dotRows({ names: ranked, dots: sorted, axis: { label: "density, logarithmic", format: percent, log: true }, summary }));
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function drawExponents(grid, { exponents, lr }) {
  const rows = [...exponents].sort((a, b) => a.exponent - b.exponent);
  const total = rows.reduce((sum, r) => sum + r.elements, 0) || 1;
  const weight = (e) => `2${[...String(e)].map((sign) => SUPERSCRIPTS[sign]).join("")}`;
  const series = [{ name: "measured", colour: "blue", xs: column(rows, "exponent"), ys: column(rows, "density") }];
  for (const [name, key, dash] of [["predicted, lr", "predicted_lr", "dash"], ["predicted, 10 lr", "predicted_10lr", "dot"]]) {
    const there = known(rows, key);
    if (there.length) series.push({ name, colour: "orange", dash, smooth: true, xs: column(there, "exponent"), ys: column(there, key) });
  }
  // The lowest exponent stands for zeros, far away from all others: the axis begins where weights are.
  const common = rows.filter((r) => r.elements / total > 1e-4 && r.exponent > -100);
  const [from, to] = [common[0] ?? rows[0], common[common.length - 1] ?? rows[rows.length - 1]];
  const floor = Math.max(1e-7, Math.min(...rows.filter((r) => r.density > 0).map((r) => r.density)) / 2);
  const within = (s) => {
    const kept = s.xs.map((x, i) => [x, s.ys[i]]).filter(([x, y]) => x >= from.exponent && x <= to.exponent && y >= floor);
    return { ...s, xs: kept.map(([x]) => x), ys: kept.map(([, y]) => y) };
  };
  const spec = {
    x: { label: "magnitude of the old weight", name: "|w| from", format: weight, whole: true, low: from.exponent, high: to.exponent },
    y: { label: "density, logarithmic", format: percent, log: true, high: 1 },
    series: series.map(within),
    summary: `Density by exponent of the old weight, from ${weight(from.exponent)} to ${weight(to.exponent)}.`,
  };
  const theory = lr === null ? "" : " Predicted: updates of lr and of 10 lr, Adam’s bound, cross a rounding step of the weight.";
  const columns = ["|w| from", "share of weights", "density", "predicted, lr", "predicted, 10 lr", "visible from |dw|"];
  const cells = rows.map((r) => [weight(r.exponent), percent(r.elements / total), percent(r.density), percent(r.predicted_lr), percent(r.predicted_10lr), r.threshold === null ? "–" : r.threshold.toExponential(2)]);
  figure(grid, { title: "Density by size of the weight", note: `A small weight has a small rounding step, so it changes more often.${theory}`, table: { columns, rows: cells } }, lineChart(spec));
}

function drawOverTime(grid, { over_time: weights, gradients, rows }) {
  const both = gradients.xs.length > 0;
  const series = [{ name: both ? "weights" : undefined, read: "density", colour: "orange", ...weights }];
  if (both) series.push({ name: "gradients", colour: "grey", dash: "dash", ...gradients });
  const spec = {
    x: { label: "state", format: whole, whole: true },
    y: { label: both ? "density, logarithmic" : "density", format: percent, from0: true, log: both },
    series,
    summary: `Density of ${plural(weights.xs.length, "pair")} over the states.`,
  };
  const cells = spread(weights.xs.map((x, i) => [whole(x), percent(weights.ys[i])]));
  figure(grid, { title: "Density over time", note: `Each state against the one k = ${rows[0].k} before it.`, table: { columns: ["state", "density"], rows: cells } }, lineChart(spec));
}

function drawTensors(grid, { tensors }) {
  const columns = ["tensor", "density", "layer", "dtype", "shape"];
  const rows = tensors.map((t) => [t.name, percent(1 - t.sparsity), t.layer, t.dtype, t.shape.join(" × ")]);
  const box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table: the tensors of the highest density" }, htmlTable({ columns, rows }));
  const heading = element("h3", {}, "Tensors of the highest density");
  grid.append(element("figure", { class: "wide" }, heading, element("p", { class: "note" }, `At k = ${tensors[0].k}, the ${tensors.length} with the largest share of changes.`), box));
}
