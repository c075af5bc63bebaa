// What the library predicts at each of some densities (`planned` in pulse_rl/report/document.py), on a link of one's choice.

const sharers = (scenario) => (scenario.shared_link ? scenario.workers : 1);

function utilisation(nbytes, stepSeconds, bandwidth) {
  return stepSeconds / (stepSeconds + (8 * nbytes) / bandwidth);
}

// `s.at` is the place of the density in `planned.densities`.
function makePlan(s, planned) {
  const methods = Object.fromEntries(Object.keys(planned.methods).map((name) => [name, onLink(s, planned, name, s.at)]));
  return { methods, full_wins: fullWins(s, planned, methods) };
}

function onLink(s, planned, name, at) {
  const { sync_bytes: nbytes, coding } = planned.methods[name][at];
  const transfer = (8 * nbytes) / s.bandwidth;
  const download = transfer * sharers(s);
  const phases = { encode: coding.encode, hash: coding.hash, upload: transfer, download, verify: coding.verify, apply: coding.apply };
  return {
    sync_bytes: nbytes,
    phases,
    sync_seconds: Object.values(phases).reduce((a, b) => a + b, 0),
    utilisation: utilisation(nbytes * sharers(s), s.step_seconds, s.bandwidth),
    worker_utilisation: s.step_seconds / (s.step_seconds + download + coding.verify + coding.apply),
    bandwidth_for_target: (8 * nbytes * sharers(s) * s.target) / ((1 - s.target) * s.step_seconds),
  };
}

// The bandwidth above which a full sync takes less time than a patch, where the coding outweighs the transfer, and the
// first density at which it does on this link.
function fullWins(s, planned, { full, auto }) {
  const coding = ({ sync_seconds: all, phases }) => all - phases.upload - phases.download;
  const extra = coding(auto) - coding(full);
  const bandwidth = extra > 0 ? (8 * (full.sync_bytes - auto.sync_bytes) * (1 + sharers(s))) / extra : null;
  const seconds = (name, at) => onLink(s, planned, name, at).sync_seconds;
  const density = planned.densities.find((_, at) => seconds("auto", at) > seconds("full", at)) ?? null;
  return { density, bandwidth };
}
