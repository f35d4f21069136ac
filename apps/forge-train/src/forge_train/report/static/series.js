"use strict";
const series = (() => {
  const short = (value) => String(+value.toPrecision(5));
  const scaled = (value, base, names) => {
    let at = 0;
    while (Math.abs(value) >= base && at < names.length - 1) { value /= base; at++; }
    return `${short(+value.toPrecision(4))}${names[at]}`;
  };
  const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
  const text = (value) => (Math.abs(value) < 1e5 ? short(value) : scaled(value, 1000, ["", "k", "M", "G", "T"]));
  const place = (value, axis) => (axis === "step" ? `step ${Math.round(value).toLocaleString("en")}` : `${text(value)} ${axis}`);

  /** The x value of a step of a run: a straight line between the points of its clock. */
  function along(clock, axis) {
    if (axis === "step") return (step) => step;
    const { step: steps, [axis]: values } = clock;
    const known = steps.map((step, at) => [step, values[at]]).filter((pair) => pair[1] !== null);
    return (step) => {
      let low = 0, high = known.length - 1;
      if (high < 1) return high ? null : known[0][1];
      while (high - low > 1) { const mid = (low + high) >> 1; if (known[mid][0] <= step) low = mid; else high = mid; }
      const [[s0, v0], [s1, v1]] = [known[low], known[high]];
      return v0 + (v1 - v0) * Math.min(1, Math.max(0, (step - s0) / (s1 - s0)));
    };
  }

  /** The mean around each point, with weights that fall exponentially on both sides, to 1/e within `width` steps. */
  function smoothed(xs, ys, width) {
    const sums = ys.map(() => [0, 0]);
    const pass = (order) => {
      let sum = 0, weight = 0, before = null;
      for (const at of order) {
        if (ys[at] === null) continue;
        const kept = before === null ? 0 : Math.exp(-Math.abs(xs[at] - xs[before]) / width);
        [sum, weight, before] = [sum * kept, weight * kept, at];
        sums[at][0] += sum;
        sums[at][1] += weight;
        [sum, weight] = [sum + ys[at], weight + 1];
      }
    };
    pass(ys.keys());
    pass([...ys.keys()].reverse());
    return ys.map((y, at) => (y === null ? null : (sums[at][0] + y) / (sums[at][1] + 1)));
  }

  /** [x, y] for the library: ordered, without points that have no place on the axis, and with gaps where a logarithm has none. */
  function table(x, xs, ys, log) {
    const kept = [[], []];
    xs.forEach((step, at) => {
      const here = x(step);
      if (here === null) return;
      kept[0].push(here);
      kept[1].push(log && ys[at] !== null && ys[at] <= 0 ? null : ys[at]);
    });
    return kept;
  }

  /** Points that no line reaches: neighbors of gaps on both sides, and the only ones of their curves. */
  function lonely(ys) {
    const there = ys.flatMap((y, at) => (y === undefined ? [] : [at]));
    const gap = (at) => at === undefined || ys[at] === null;
    return there.filter((at, i) => ys[at] !== null && gap(there[i - 1]) && gap(there[i + 1]));
  }

  return { along, bytes, lonely, place, smoothed, table, text };
})();
