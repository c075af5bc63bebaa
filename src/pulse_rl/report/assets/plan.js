// Mirrors pulse_rl/plan/model.py, whose docstring has the formulas; a test compares the two. `costs` are that module's.

const METHODS = ["full", "zstd", "context", "history"];
const CODING = ["encode", "hash", "verify", "apply"];
const BLOCK_ELEMENTS = 2 ** 22;
const SHARD_BYTES = 2 ** 30;
const BISECTIONS = 60;
const WITH_HISTORY = 0.95;

function makePlan(scenario, costs) {
  const methods = Object.fromEntries(METHODS.map((name) => [name, predicted(scenario, name, costs)]));
  return { methods, full_wins: crossover(scenario, methods, costs) };
}

function positionBits(density) {
  if (!(density > 0 && density < 1)) return 0;
  return -Math.log2(density) - ((1 / density - 1) * Math.log1p(-density)) / Math.LN2;
}

function syncBytes(method, params, density, paramBytes) {
  const full = params * paramBytes;
  if (method === "full") return full;
  const where = positionBits(density);
  const context = (2.4 + 0.52 * where + 5 * density ** 2) / 8;
  const perChange = { zstd: 1.25 + 0.17 * where, context, history: WITH_HISTORY * context }[method];
  return Math.min(full, params * density * perChange + 1000 + 50 * Math.ceil(params / BLOCK_ELEMENTS));
}

function utilisation(nbytes, stepSeconds, bandwidth) {
  return stepSeconds / (stepSeconds + (8 * nbytes) / bandwidth);
}

function bandwidthFor(nbytes, stepSeconds, target) {
  return (8 * nbytes * target) / ((1 - target) * stepSeconds);
}

const sharers = (scenario) => (scenario.shared_link ? scenario.workers : 1);
const uplink = (scenario) => scenario.upload_bandwidth ?? scenario.bandwidth;

function phasesOf(s, method, nbytes, costs) {
  const changes = s.params * s.density;
  const stateBytes = s.param_bytes * s.params;
  const tree = costs.hash_byte * stateBytes;
  let atOnce, hashed, verified;
  if (method === "full") {
    atOnce = Math.min(s.cores, Math.ceil(nbytes / SHARD_BYTES));
    hashed = tree / s.cores + (costs.anchor_hash_byte * stateBytes) / atOnce;
    verified = tree / s.cores + (costs.anchor_verify_byte * stateBytes) / atOnce;
  } else {
    atOnce = Math.min(s.cores, Math.ceil(s.params / BLOCK_ELEMENTS));
    hashed = verified = tree / atOnce;
  }
  const own = costs.methods[method];
  return {
    encode: (1e-9 * (own.encode * s.params + own.encode_change * changes)) / atOnce,
    hash: 1e-9 * hashed,
    upload: (8 * nbytes) / uplink(s) + 3 * s.round_trip_seconds,
    download: (8 * nbytes * sharers(s)) / s.bandwidth + 4 * s.round_trip_seconds,
    verify: 1e-9 * verified,
    apply: (1e-9 * (own.apply * s.params + own.apply_change * changes)) / atOnce,
  };
}

function predicted(s, method, costs) {
  const measured = s.bytes_per_changed?.[method];
  const nbytes =
    measured === undefined
      ? syncBytes(method, s.params, s.density, s.param_bytes)
      : Math.min(s.params * s.param_bytes, measured * s.params * s.density);
  const phases = phasesOf(s, method, nbytes, costs);
  const syncSeconds = Object.values(phases).reduce((a, b) => a + b, 0);
  return {
    sync_bytes: Math.round(nbytes),
    phases,
    sync_seconds: syncSeconds,
    utilisation: utilisation(nbytes * sharers(s), s.step_seconds, s.bandwidth),
    worker_utilisation: s.step_seconds / (s.step_seconds + phases.download + phases.verify + phases.apply),
    bandwidth_for_target: bandwidthFor(nbytes * sharers(s), s.step_seconds, s.target),
  };
}

function crossover(s, methods, costs) {
  const { full, context } = methods;
  const coding = (method) => CODING.reduce((sum, phase) => sum + method.phases[phase], 0);
  const saved = 8 * (full.sync_bytes - context.sync_bytes) * (1 / uplink(s) + sharers(s) / s.bandwidth);
  const extra = coding(context) - coding(full);
  const bandwidth = extra > 0 ? (s.bandwidth * saved) / extra : null;
  const fullWins = (density) =>
    predicted({ ...s, density, bytes_per_changed: {} }, "context", costs).sync_seconds > full.sync_seconds;
  if (!fullWins(1)) return { density: null, bandwidth };
  let [low, high] = [0, 1];
  for (let i = 0; i < BISECTIONS; i++) {
    const middle = (low + high) / 2;
    [low, high] = fullWins(middle) ? [low, middle] : [middle, high];
  }
  return { density: high, bandwidth };
}
