// The planner: sliders over the model of plan.js.

const METHOD_NAMES = { full: "full sync", zstd: "zstd, the paper’s", context: "context, ours", history: "history, ours" };
const METHOD_COLOURS = { full: "grey", zstd: "orange", context: "blue", history: "purple" };
const METHOD_DASHES = { full: "dash", zstd: "dot", context: "", history: "" };
const LABELS_AT = { full: 0.3, zstd: 0.5, context: 0.7, history: 0.9 };
const PLAN_PHASES = { encode: "blue", hash: "purple", upload: "orange", download: "red", verify: "green", apply: "grey" };

// [key, label, from, to, how it reads]; a slider moves along the logarithm.
const SLIDERS = [
  ["params", "Parameters", 1e6, 1e12, count],
  ["density", "Density", 1e-5, 1, percent],
  ["step_seconds", "Work between two syncs", 0.01, 1000, seconds],
  ["bandwidth", "Bandwidth of a worker’s link", 1e6, 1e12, bandwidth],
  ["workers", "Workers", 1, 1024, whole],
  ["cores", "Cores for coding", 1, 128, whole],
];
const WHOLE = new Set(["params", "workers", "cores"]);
const STEPS = 1000;

function drawPlanner(defaults, costs) {
  const scenario = { ...defaults };
  const lead = "What a sync will cost on another model, link or fleet. Predicted by the formulas of “pulse plan”, not measured; history as with FP32 masters, unless a study measured it.";
  const grid = section("Planner", lead);
  const controls = element("div", { class: "controls" });
  const results = element("div", { class: "results", id: "plan" });
  grid.className = "planner";
  grid.append(controls, results);
  const redraws = [];
  const update = () => redraws.forEach((redraw) => redraw());
  for (const slider of SLIDERS) controls.append(control(slider, scenario, defaults, update));
  controls.append(sharedControl(scenario, update));

  const plan = () => makePlan(scenario, costs);
  const summary = element("div", { "aria-live": "polite" });
  results.append(summary);
  redraws.push(() => summary.replaceChildren(planTable(plan(), scenario), fullWinsSentence(plan())));
  update();
  redraws.push(curveFigure(results, scenario), phaseFigure(results, plan));
}

function control([key, label, from, to, format], scenario, defaults, update) {
  const [low, high] = [Math.min(from, scenario[key] || from), Math.max(to, scenario[key])];
  const position = (value) => (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * STEPS;
  const id = `plan-${key}`;
  const output = element("output", { for: id }, format(scenario[key]));
  const input = element("input", { type: "range", id, min: 0, max: STEPS, step: 1, value: position(scenario[key]) });
  input.setAttribute("aria-valuetext", format(scenario[key]));
  input.addEventListener("input", () => {
    const value = low * (high / low) ** (Number(input.value) / STEPS);
    scenario[key] = WHOLE.has(key) ? Math.round(value) : Number(value.toPrecision(3));
    // Bytes a change that were measured hold at the density where they were measured.
    if (key === "density") scenario.bytes_per_changed = scenario.density === defaults.density ? defaults.bytes_per_changed : {};
    output.textContent = format(scenario[key]);
    input.setAttribute("aria-valuetext", format(scenario[key]));
    update();
  });
  return element("div", { class: "control" }, element("label", { for: id }, label, output), input);
}

function sharedControl(scenario, update) {
  const input = element("input", { type: "checkbox", id: "plan-shared" });
  input.checked = scenario.shared_link;
  input.addEventListener("change", () => {
    scenario.shared_link = input.checked;
    update();
  });
  return element("div", { class: "control check" }, element("label", { for: "plan-shared" }, input, "All workers load through one link"));
}

function planTable({ methods }, scenario) {
  const target = percent(scenario.target);
  const columns = ["", "bytes a sync", "time of a sync", "GPU utilisation", "if each step waits", `bandwidth for ${target}`];
  const body = METHODS.map((name) => {
    const m = methods[name];
    const values = [bytes(m.sync_bytes), seconds(m.sync_seconds), percent(m.utilisation), percent(m.worker_utilisation), bandwidth(m.bandwidth_for_target)];
    const swatch = element("span", { class: `swatch ${METHOD_COLOURS[name]}` });
    const cells = values.map((value, i) => element("td", { "data-label": columns[i + 1] }, value));
    return element("tr", { "data-method": name }, element("th", { scope: "row" }, swatch, METHOD_NAMES[name]), ...cells);
  });
  const head = element("tr", {}, ...columns.map((name) => (name ? element("th", { scope: "col" }, name) : element("td"))));
  return element("table", { class: "plan" }, element("thead", {}, head), element("tbody", {}, ...body));
}

function fullWinsSentence({ full_wins: wins }) {
  const faster = [];
  if (wins.bandwidth !== null) faster.push(`above ${bandwidth(wins.bandwidth)}`);
  if (wins.density !== null) faster.push(`above ${percent(wins.density)} density`);
  const text = faster.length ? `A full sync takes less time than a patch ${faster.join(", or ")}.` : "A full sync never takes less time than a patch here.";
  return element("p", { class: "note", id: "full-wins" }, text);
}

function curveFigure(host, scenario) {
  const low = 1e6, high = 1e12, points = 121;
  const xs = Array.from({ length: points }, (_, i) => low * (high / low) ** (i / (points - 1)));
  const note = "The share of a step in which the GPU computes, when only the transfer to the worker blocks it.";
  return figure(host, { title: "Utilisation by bandwidth", note }, (plot, width) => {
    const { methods } = makePlan(scenario, COSTS);
    const series = METHODS.map((name) => ({
      name, colour: METHOD_COLOURS[name], dash: METHOD_DASHES[name], smooth: true, xs,
      labelAt: LABELS_AT[name],
      ys: xs.map((b) => utilisation(methods[name].sync_bytes * sharers(scenario), scenario.step_seconds, b)),
    }));
    const utilisations = METHODS.map((name) => `${METHOD_NAMES[name]} ${percent(methods[name].utilisation)}`).join(", ");
    lineChart({
      x: { label: "bandwidth of a worker’s link", name: "at", format: bandwidth, log: true, low, high, ticks: [1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12] },
      y: { label: "GPU utilisation", format: percent, low: 0, high: 1 },
      series, height: 240,
      marks: [{ y: scenario.target, label: percent(scenario.target) }, { x: Math.min(high, Math.max(low, scenario.bandwidth)), label: bandwidth(scenario.bandwidth) }],
      summary: `Utilisation at ${bandwidth(scenario.bandwidth)}: ${utilisations}.`,
    })(plot, width);
  });
}

function phaseFigure(host, plan) {
  return figure(host, { title: "Where the time of a sync goes", note: "One after another, nothing overlapped." }, (plot, width) => {
    const { methods } = plan();
    const rows = METHODS.map((name) => ({
      name: METHOD_NAMES[name],
      total: seconds(methods[name].sync_seconds),
      parts: Object.entries(methods[name].phases).filter(([, v]) => v > 0).map(([phase, value]) => ({ name: phase, value })),
    }));
    const summary = rows.map((row) => `${row.name} ${row.total}`).join(", ");
    stackedBars({ rows, colours: PLAN_PHASES, format: seconds, summary: `Time of a sync: ${summary}.` })(plot, width);
  });
}
