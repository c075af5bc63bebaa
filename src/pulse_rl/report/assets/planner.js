// The planner: sliders over the model of plan.js.

const METHOD_NAMES = { full: "full sync", zstd: "zstd, the paper’s", auto: "auto, no history", history: "auto, history" };
const METHODS = Object.keys(METHOD_NAMES);
const METHOD_COLOURS = { full: "grey", zstd: "orange", auto: "blue", history: "purple" };
const METHOD_DASHES = { full: "dash", zstd: "dot", auto: "", history: "" };
const LABELS_AT = { full: 0.3, zstd: 0.5, auto: 0.7, history: 0.9 };
const PLAN_PHASES = { encode: "blue", hash: "purple", upload: "orange", download: "red", verify: "green", apply: "grey" };

// [key, label, from, to, how it reads]; a slider moves along the logarithm. That of the density has a place for each of
// those that the library planned.
const SLIDERS = [
  ["step_seconds", "Work between two syncs", 0.01, 1000, seconds],
  ["bandwidth", "Bandwidth of a worker’s link", 1e6, 1e12, bandwidth],
  ["workers", "Workers", 1, 1024, whole],
];
const STEPS = 1000;

function drawPlanner(defaults, planned) {
  const scenario = { ...defaults, at: planned.densities.indexOf(defaults.density) };
  const lead = "What a sync will cost on another link, at another density or in a fleet. Predicted by “pulse plan”, not measured; history as with FP32 masters, unless a study measured it.";
  const note = `${count(defaults.params)} parameters and ${whole(defaults.cores)} cores for coding.`;
  const grid = section("Planner", `${lead} ${note}`);
  const controls = element("div", { class: "controls" });
  const results = element("div", { class: "results", id: "plan" });
  grid.className = "planner";
  grid.append(controls, results);
  const redraws = [];
  const update = () => redraws.forEach((redraw) => redraw());
  controls.append(densityControl(scenario, planned, update));
  for (const each of SLIDERS) controls.append(control(each, scenario, update));
  controls.append(sharedControl(scenario, update));

  const plan = () => makePlan(scenario, planned);
  const summary = element("div", { "aria-live": "polite" });
  results.append(summary);
  redraws.push(() => summary.replaceChildren(planTable(plan(), scenario), fullWinsSentence(plan())));
  update();
  redraws.push(curveFigure(results, scenario, plan), phaseFigure(results, plan));
}

function slider(key, label, attributes, text, move) {
  const id = `plan-${key}`;
  const output = element("output", { for: id }, text());
  const input = element("input", { type: "range", id, step: 1, min: 0, ...attributes });
  input.setAttribute("aria-valuetext", text());
  input.addEventListener("input", () => {
    move(Number(input.value));
    output.textContent = text();
    input.setAttribute("aria-valuetext", text());
  });
  return element("div", { class: "control" }, element("label", { for: id }, label, output), input);
}

function densityControl(scenario, planned, update) {
  const places = { max: planned.densities.length - 1, value: scenario.at };
  return slider("density", "Density", places, () => percent(planned.densities[scenario.at]), (at) => {
    scenario.at = at;
    update();
  });
}

function control([key, label, from, to, format], scenario, update) {
  const [low, high] = [Math.min(from, scenario[key] || from), Math.max(to, scenario[key])];
  const position = (value) => (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * STEPS;
  return slider(key, label, { max: STEPS, value: position(scenario[key]) }, () => format(scenario[key]), (place) => {
    const value = low * (high / low) ** (place / STEPS);
    scenario[key] = key === "workers" ? Math.round(value) : Number(value.toPrecision(3));
    update();
  });
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

function curveFigure(host, scenario, plan) {
  const low = 1e6, high = 1e12, points = 121;
  const xs = Array.from({ length: points }, (_, i) => low * (high / low) ** (i / (points - 1)));
  const note = "The share of a step in which the GPU computes, when only the transfer to the worker blocks it.";
  return figure(host, { title: "Utilisation by bandwidth", note }, (plot, width) => {
    const { methods } = plan();
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
