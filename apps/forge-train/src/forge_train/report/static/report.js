"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const frames = [...document.querySelectorAll("figure[data-chart]")];
  const widths = [0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3]; // of smoothing, as a part of the longest run
  const powers = Array.from({ length: 60 }, (_, at) => 2 ** at); // between ticks of bytes
  const dashes = [[], [7, 4], [2, 3], [10, 4, 2, 4]];
  const several = runs.length > 1;
  const longest = Math.max(1, ...runs.flatMap((run) => run.clock.step.slice(-1)));
  const state = { axis: "step", smooth: 0, log: false, zoom: null, off: new Set(), hidden: charts.map(() => new Set()) };
  let plots = [], hovered = null;

  const { bytes, smoothed, text } = series;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const along = (run) => series.along(runs[run].clock, state.axis);
  const place = (value) => series.place(value, state.axis);
  const table = (run, xs, ys) => series.table(along(run), xs, ys, state.log);
  const stroke = (chart, curve) => {
    if (several) return color(`--c${curve.run % 8}`);
    return chart.labels.length > 8 ? `hsl(${220 - (200 * curve.label) / (chart.labels.length - 1)} 65% 55%)` : color(`--c${curve.label}`);
  };
  const visible = (number, curve) => !state.off.has(curve.run) && !state.hidden[number].has(curve.label);

  /** The lines of a chart: one for each curve, and when smoothing a pale one of the values below it. */
  function lines(chart) {
    return chart.curves.flatMap((curve) => {
      const line = { curve, color: stroke(chart, curve), dash: several ? dashes[curve.label % 4] : [], points: curve.dots };
      const raw = table(curve.run, curve.x, curve.y);
      if (!state.smooth || curve.dots || chart.exact) return [{ ...line, data: raw, width: 1.6 }];
      const [xs, ys] = curve.mx ? [curve.mx, curve.my] : [curve.x, curve.y];
      const strong = table(curve.run, xs, smoothed(xs, ys, widths[state.smooth] * longest));
      return [{ ...line, data: raw, width: 1, pale: true }, { ...line, data: strong, width: 1.8 }];
    });
  }

  function range(chart) {
    return (plot, low, high) => {
      if (low === null) return state.log ? [1, 10] : [0, 1];
      const referred = state.zoom ? [] : chart.references.map((one) => one.value);
      [low, high] = [Math.min(low, ...referred), Math.max(high, ...referred)];
      if (state.log) return [low / 1.06, high * 1.06];
      if (chart.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [chart.zero && low === 0 ? 0 : low - room, high + room];
    };
  }

  /** Lines across for references, lines down for restarts, triangles for other faults. */
  function marks(chart) {
    return (plot) => {
      const { ctx, bbox } = plot, ratio = devicePixelRatio;
      const path = (points, dash) => {
        ctx.setLineDash(dash.map((part) => part * ratio));
        ctx.beginPath();
        points.forEach(([x, y], at) => (at ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
        ctx.stroke();
      };
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.lineWidth = ratio;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      [ctx.textAlign, ctx.textBaseline] = ["right", "bottom"];
      for (const { value, text: said } of chart.references) {
        const y = plot.valToPos(value, "y", true);
        ctx.strokeStyle = ctx.fillStyle = color("--dim");
        path([[bbox.left, y], [bbox.left + bbox.width, y]], [5, 4]);
        const spot = [said, bbox.left + bbox.width - 4 * ratio, y - 3 * ratio];
        ctx.setLineDash([]);
        [ctx.strokeStyle, ctx.lineWidth] = [color("--soft"), 4 * ratio]; // a halo, as curves may pass behind
        ctx.strokeText(...spot);
        ctx.fillText(...spot);
        ctx.lineWidth = ratio;
      }
      runs.forEach((run, number) => {
        if (state.off.has(number)) return;
        const x = along(number);
        ctx.strokeStyle = several ? color(`--c${number % 8}`) : color("--dim");
        for (const at of run.restarts.map((step) => plot.valToPos(x(step), "x", true)))
          path([[at, bbox.top], [at, bbox.top + bbox.height]], [2, 3]);
        ctx.fillStyle = color("--bad");
        for (const at of run.faults.map((step) => plot.valToPos(x(step), "x", true))) {
          const foot = bbox.top + bbox.height;
          ctx.beginPath();
          [[0, -8], [5, 0], [-5, 0]].forEach(([dx, dy]) => ctx.lineTo(at + dx * ratio, foot + dy * ratio));
          ctx.fill();
        }
      });
      ctx.restore();
    };
  }

  /** Says what is under the pointer: at most a dozen curves, those nearest to it. */
  function tell(chart, shown, box) {
    return (plot) => {
      const { left, top, idx, idxs } = plot.cursor;
      box.hidden = plot !== hovered || idx === null || idx === undefined || left < 0;
      if (box.hidden) return;
      const told = shown
        .map((line, at) => ({ line, order: at, at: idxs[at + 1], series: plot.series[at + 1], value: plot.data[at + 1][idxs[at + 1]] }))
        .filter(({ line, series, value }) => series.show && !line.pale && value !== null && value !== undefined)
        .sort((a, b) => Math.abs(plot.valToPos(a.value, "y") - top) - Math.abs(plot.valToPos(b.value, "y") - top))
        .slice(0, 12)
        .sort((a, b) => b.value - a.value || a.order - b.order);
      const pixel = (at) => plot.valToPos(plot.data[0][at], "x"), off = (at) => Math.abs(pixel(at) - left);
      const nearest = told.reduce((best, { at }) => (off(at) < off(best) ? at : best), told.length ? told[0].at : idx);
      box.replaceChildren(row("b", place(plot.data[0][nearest]) + (state.smooth && !chart.exact ? ", smoothed" : "")));
      for (const { line, at, value } of told) {
        const names = [several ? runs[line.curve.run].name : "", several && chart.labels.length < 2 ? "" : chart.labels[line.curve.label]];
        const where = Math.abs(pixel(at) - pixel(nearest)) < 4 ? "" : ` (${place(plot.data[0][at])})`;
        const item = row("div", `${names.filter(Boolean).join(", ")}${where}`);
        const spot = document.createElement("i");
        spot.className = "swatch";
        spot.style.background = line.color;
        item.prepend(spot);
        item.append(row("span", chart.bytes ? bytes(value) : text(value)));
        box.append(item);
      }
      const right = left > plot.over.clientWidth / 2;
      box.style.left = right ? "" : `${left + 14}px`;
      box.style.right = right ? `${plot.over.clientWidth - left + 14}px` : "";
    };
  }
  function row(tag, words) {
    const made = document.createElement(tag);
    made.textContent = words;
    return made;
  }

  function draw(frame, number) {
    const chart = charts[number], shown = lines(chart), box = row("div", "");
    box.className = "tip";
    box.hidden = true;
    const axis = { stroke: color("--dim"), grid: { stroke: color("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: frame.clientWidth - 16,
      height: 250,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "forge", scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" } },
        drag: { setScale: false, x: true, y: false, dist: 4 },
        hover: { prox: 40 },
        points: { size: 7 },
      },
      scales: { x: { time: false }, y: { distr: state.log ? 3 : 1, range: range(chart) } },
      axes: [
        { ...axis, grid: { show: false }, size: 30, values: (_, at) => at.map((value) => (value === null ? "" : text(value))) },
        { ...axis, size: 62, ...(chart.bytes && { incrs: powers }), values: (_, at) => at.map((value) => (value === null ? "" : chart.bytes ? bytes(value) : text(value))) },
      ],
      series: [{}, ...shown.map((line) => ({
        show: visible(number, line.curve), stroke: line.color, width: line.width, dash: line.dash, alpha: line.pale ? 0.25 : 1,
        points: { size: 5, fill: line.color, show: line.points, filter: (plot, at) => (line.points ? null : series.lonely(plot.data[at])) },
      }))],
      hooks: {
        draw: [marks(chart)],
        setCursor: [tell(chart, shown, box)],
        setSelect: [(self) => {
          const { left, width } = self.select;
          if (width > 3) zoom([self.posToVal(left, "x"), self.posToVal(left + width, "x")]);
          self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    }, uPlot.join(shown.map((line) => line.data), shown.map(() => [2, 2])), frame);
    plot.over.append(box);
    plot.over.addEventListener("mouseenter", () => (hovered = plot));
    plot.over.addEventListener("mouseleave", () => { hovered = null; box.hidden = true; });
    plot.over.addEventListener("dblclick", () => zoom(null));
    return plot;
  }

  /** The same part of the x axis in all charts; null for all of the runs that are shown. */
  function zoom(part) {
    state.zoom = part;
    const ends = charts.flatMap((chart) => chart.curves.filter((curve) => !state.off.has(curve.run)).flatMap(({ run, x }) => [x[0], x.at(-1)].map(along(run))));
    const known = ends.filter((end) => end !== null);
    let [low, high] = part || (known.length ? [Math.min(...known), Math.max(...known)] : [0, 1]);
    if (high <= low) [low, high] = [low - 1, high + 1];
    plots.forEach((plot) => plot.setScale("x", { min: low, max: high }));
    document.getElementById("range").textContent = part ? `${place(low)} to ${place(high)}` : "drag over a curve to zoom";
    document.getElementById("all").hidden = !part;
  }

  function redraw() {
    plots.forEach((plot) => plot.destroy());
    [plots, hovered] = [[], null];
    plots = frames.map(draw);
    zoom(state.zoom);
  }

  const show = () => {
    plots.forEach((plot, number) => plot.batch(() => lines(charts[number]).forEach((line, at) => plot.setSeries(at + 1, { show: visible(number, line.curve) }))));
    zoom(state.zoom);
  };
  const toggle = (set, item, button) => {
    button.setAttribute("aria-pressed", String(set.has(item)));
    if (!set.delete(item)) set.add(item);
    show();
  };
  for (const button of document.querySelectorAll("[data-axis]"))
    button.onclick = () => {
      [state.axis, state.zoom] = [button.dataset.axis, null];
      document.querySelectorAll("[data-axis]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      redraw();
    };
  for (const button of document.querySelectorAll("[data-run]")) button.onclick = () => toggle(state.off, +button.dataset.run, button);
  frames.forEach((frame, number) => {
    const { labels } = charts[number];
    if (labels.length < 2) return;
    const legend = row("span", "");
    legend.className = labels.length > 16 ? "legend many" : "legend";
    labels.forEach((label, at) => {
      const button = row("button", label), spot = document.createElement("i");
      button.setAttribute("aria-pressed", "true");
      button.onclick = () => toggle(state.hidden[number], at, button);
      spot.className = several ? `dash d${at % 4}` : `swatch${labels.length > 8 ? "" : ` s${at}`}`;
      if (!several && labels.length > 8) spot.style.background = stroke(charts[number], { label: at });
      button.prepend(spot);
      legend.append(button);
    });
    frame.firstElementChild.append(legend);
  });
  document.getElementById("smooth").oninput = (event) => {
    state.smooth = +event.target.value;
    document.getElementById("width").textContent = state.smooth ? `${text(Math.max(1, Math.round(widths[state.smooth] * longest)))} steps` : "off";
    redraw();
  };
  document.getElementById("log").onclick = (event) => {
    state.log = !state.log;
    event.target.setAttribute("aria-pressed", String(state.log));
    redraw();
  };
  document.getElementById("all").onclick = () => zoom(null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let wide = innerWidth;
  addEventListener("resize", () => requestAnimationFrame(() => { if (innerWidth !== wide) { wide = innerWidth; redraw(); } }));
  redraw();
})();
