// Numbers as people read them: three significant digits, decimal prefixes, no locale.

function rounded(value, digits = 3) {
  return String(Number(value.toPrecision(digits)));
}

function scaled(value, unit, prefixes) {
  if (value === null || !Number.isFinite(value)) return "–";
  for (const [factor, prefix] of prefixes) {
    if (Math.abs(value) >= factor * 0.9995) return `${rounded(value / factor)} ${prefix}${unit}`;
  }
  const [factor, prefix] = prefixes[prefixes.length - 1];
  return `${rounded(value / factor)} ${prefix}${unit}`;
}

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const bytes = (value) => scaled(value, "B", LARGE);
const bandwidth = (value) => scaled(value, "bit/s", LARGE);
const count = (value) => scaled(value, "", [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]]).trim();

function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value >= 172800) return `${rounded(value / 86400)} days`;
  if (value >= 5400) return `${rounded(value / 3600)} h`;
  if (value >= 90) return `${rounded(value / 60)} min`;
  return value === 0 ? "0 s" : scaled(value, "s", [[1, ""], [1e-3, "m"], [1e-6, "µ"]]);
}

// Shares near 1 keep the digits that tell them apart from it: 99.26%, 99.991%.
function percent(share) {
  if (share === null || !Number.isFinite(share)) return "–";
  if (share < 0.5) return `${rounded(share * 100)}%`;
  const missing = (1 - share) * 100;
  const decimals = missing > 0 ? Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(missing)))) : 0;
  return `${Number((share * 100).toFixed(decimals))}%`;
}

const whole = (value) => String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, " ");
const plain = (value) => (value === null || !Number.isFinite(value) ? "–" : rounded(value));

// Round places on a linear scale, about `wanted` of them, that lie within [low, high].
function linearTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.9999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step);
  return ticks.map((tick) => Number(tick.toPrecision(12)));
}

// Powers of ten within [low, high], with 2 and 5 of each where they are few, thinned where they are many.
function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  const factors = decades < 1.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / Math.max(1, wanted)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % every) continue;
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
    }
  }
  return ticks;
}
