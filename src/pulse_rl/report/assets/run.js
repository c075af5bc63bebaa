// The run: reward, density, bytes, the workers' timeline, phases.

// In the order in which they happen.
const PHASES = {
  resume: "purple", build: "blue", upload: "orange", commit: "green",
  plan: "purple", fetch: "orange", apply: "blue", restore: "green", other: "grey",
};

function drawRun(run) {
  const grid = section("The run");
  drawWarnings(grid, run);
  if (run.series.reward.xs.length) drawReward(grid, run.series);
  for (const [name, values] of Object.entries(run.evaluations)) drawEvaluation(grid, name, values);
  if (run.by_bytes) drawRewardByBytes(grid, run.by_bytes);
  if (run.series.density.xs.length) {
    drawDensity(grid, run);
    drawBytes(grid, run);
  }
  drawPhases(grid, run);
  if (run.workers.length) drawWorkers(grid, run);
}

function drawWarnings(grid, run) {
  for (const d of run.drifts) {
    const band = `${percent(d.low)} to ${percent(d.high)}`;
    const text = `Density drift at version ${whole(d.version)}: ${percent(d.density)}, outside ${band}.`;
    grid.append(element("p", { class: "warning wide" }, text));
  }
  if (!run.failures.count) return;
  const rows = run.failures.newest.map((f) => [f.process, f.kind, f.link, f.reason]);
  const details = tableOnDemand({ columns: ["process", "error", "link", "reason"], rows }, "failed paths");
  const text = `${plural(run.failures.count, "path")} to a version failed, and another was taken.`;
  grid.append(element("div", { class: "warning wide" }, text, details));
}

const versionAxis = { label: "version", format: whole, whole: true };

function table(name, format, { xs, ys, lows, highs }) {
  const columns = lows ? ["from version", `mean ${name}`, "lowest", "highest"] : ["version", name];
  const row = (v, i) => [whole(v), ...[ys, lows, highs].filter(Boolean).map((values) => format(values[i]))];
  return () => ({ columns, rows: spread(xs.map(row)) });
}

function drawReward(grid, series) {
  const each = { read: "reward", kind: "dots", colour: "blue", ...series.reward };
  const mean = { name: "running mean", colour: "blue", ...series.mean_reward, lows: undefined };
  const spec = {
    x: versionAxis,
    y: { label: "reward", format: plain },
    series: [each, mean],
    summary: `Reward by version, running mean from ${plain(mean.ys[0])} to ${plain(mean.ys[mean.ys.length - 1])}.`,
  };
  figure(grid, { title: "Reward", note: each.lows ? "The running mean, and the range of what was averaged." : "Each version, and the running mean.", table: table("reward", plain, series.reward) }, lineChart(spec));
}

function drawEvaluation(grid, name, values) {
  const [first, last] = [values.ys[0], values.ys[values.ys.length - 1]];
  const spec = {
    x: versionAxis,
    y: { label: name, format: plain },
    series: [{ read: name, colour: "green", ...values }],
    summary: `${name} by version, from ${plain(first)} to ${plain(last)}.`,
  };
  figure(grid, { title: `Evaluation: ${name}`, note: "What the program of `pulse evaluate` printed for each version.", table: table(name, plain, values) }, lineChart(spec));
}

function drawRewardByBytes(grid, { sent, dense, totals }) {
  const spec = {
    x: { label: "bytes that have left a trainer, logarithmic", format: bytes, log: true },
    y: { label: "reward, running mean", format: plain },
    series: [
      { name: `all-reduce ${bytes(totals[1])}`, colour: "grey", dash: "dash", ...dense, lows: undefined },
      { name: `PULSELoCo ${bytes(totals[0])}`, colour: "blue", ...sent, lows: undefined },
    ],
    summary: `The same rewards after ${bytes(totals[0])} and, by a dense all-reduce, ${bytes(totals[1])}.`,
  };
  const note = `Gradients between trainers, as counted, and what a dense all-reduce of the same rounds sends, ${plain(totals[1] / totals[0])} times more.`;
  const rows = spread(sent.xs.map((x, i) => [bytes(x), bytes(dense.xs[i]), plain(sent.ys[i])]));
  figure(grid, { title: "Reward by bytes", note, table: { columns: ["bytes", "all-reduce", "mean reward"], rows } }, lineChart(spec));
}

function drawDensity(grid, run) {
  const mean = 1 - run.summary.sparsity;
  const spec = {
    x: versionAxis,
    y: { label: "density, share of weights", format: percent, from0: true },
    series: [{ read: "density", colour: "orange", ...run.series.density }],
    marks: [{ y: mean, label: `mean ${percent(mean)}` }],
    summary: `Density by version, mean ${percent(mean)}.`,
  };
  const range = run.series.density.lows ? " The area is the range of what was averaged." : "";
  const note = `Weights whose bits differ from the version before, of all weights.${range}`;
  figure(grid, { title: "Density", note, table: table("density", percent, run.series.density) }, lineChart(spec));
}

function drawBytes(grid, run) {
  const [patch, full, s] = [run.series.patch_bytes, run.series.full_bytes, run.summary];
  const spec = {
    x: versionAxis,
    y: { label: "bytes a sync, logarithmic", format: bytes, log: true },
    series: [
      { name: `full ${bytes(s.full_bytes)}`, colour: "grey", dash: "dash", ...full },
      { name: `patch ${bytes(s.bytes_per_sync)}`, colour: "blue", ...patch },
    ],
    summary: `Patches have ${bytes(s.bytes_per_sync)} on average, full syncs ${bytes(s.full_bytes)}.`,
  };
  const anchors = s.anchors ? ` Besides, ${plural(s.anchors, "anchor")} of ${bytes(s.anchor_bytes)} in all for newcomers.` : "";
  const note = `Patches against full syncs, ${plain(s.full_bytes / s.bytes_per_sync)} times smaller.${anchors}`;
  figure(grid, { title: "Bytes", note, table: table("patch bytes", bytes, patch) }, lineChart(spec));
}

function drawPhases(grid, run) {
  const row = (name, phases) => {
    const parts = Object.keys(PHASES).filter((n) => phases[n] > 0).map((n) => ({ name: n, value: phases[n] }));
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    return { name, total: seconds(total), parts };
  };
  const rows = [];
  if (Object.keys(run.publish_phases).length) rows.push(row("publish", run.publish_phases));
  for (const w of run.workers) rows.push(row(`sync, ${w.name}`, w.phases));
  if (!rows.length) return;
  const shown = rows.slice(0, 9);
  const cells = rows.flatMap((r) => r.parts.map((p) => [r.name, p.name, seconds(p.value)]));
  const more = rows.length > shown.length ? ` ${rows.length - shown.length} more workers are in the table.` : "";
  const note = `Mean time of a call: blue is coding, orange the network.${more}`;
  const summary = shown.map((r) => `${r.name} ${r.total}`).join(", ");
  figure(
    grid,
    { title: "Phases", note, table: { columns: ["call", "phase", "mean time"], rows: cells } },
    stackedBars({ rows: shown, colours: PHASES, format: seconds, summary: `Mean time by phase: ${summary}.` }),
  );
}

function drawWorkers(grid, run) {
  const columns = ["worker", "syncs", "fetched", "median sync", "median lag", "versions behind, at worst"];
  const rows = run.workers.map((w) => [w.name, whole(w.syncs), bytes(w.fetched_bytes), seconds(w.sync_seconds), seconds(w.lag_seconds), whole(w.worst_behind)]);
  const more = run.more_workers ? ` ${plural(run.more_workers, "more worker")} not shown.` : "";
  const note = `Versions each worker is behind the trainer’s newest, and when it syncs. Lag is the time from a commit to its sync, by the two machines’ clocks.${more}`;
  const summary = `Timeline of ${plural(run.workers.length, "worker")} over ${seconds(run.seconds)}.`;
  figure(
    grid,
    { title: "Workers over time", note, wide: true, table: { columns, rows } },
    lanes({ workers: run.workers, until: run.seconds, summary }),
  );
}
