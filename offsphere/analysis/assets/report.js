"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const CELLS = ["cosine", "qnorm", "dnorm", "dot", "learnable"];
  const SHAPES = ["circle", "triangle", "wedge", "square", "diamond"];
  const tip = document.getElementById("tip");

  // Elements. Texts go in as text nodes, so nothing in the data can become markup.
  function make(parent, tag, attributes = {}, text = null) {
    const svg = parent.namespaceURI === "http://www.w3.org/2000/svg" || tag === "svg";
    const node = svg
      ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") node.style.cssText = value;
      else node.setAttribute(name, value);
    }
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
  }

  // Numbers, written as the tables that came with the page write them.
  function number(value, decimals, signed = false) {
    if (value === null || value === undefined) return "–";
    const text = Math.abs(value).toFixed(decimals);
    const sign = Number(text) === 0 ? "" : value < 0 ? "−" : signed ? "+" : "";
    return sign + text;
  }
  function interval(low, high, decimals, signed = false) {
    if (low === null || high === null) return "–";
    return `[${number(low, decimals, signed)}, ${number(high, decimals, signed)}]`;
  }
  function tickText(value, step) {
    if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4)) {
      return value.toExponential(0).replace("-", "−").replace("+", "");
    }
    const decimals = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
    return number(value, decimals);
  }

  // Scales.
  const seedCount = (n) => `${n} ${n === 1 ? "seed" : "seeds"}`;
  const known = (values) => values.filter((x) => x !== null && x !== undefined && isFinite(x));
  function extent(values, pad = 0.06) {
    const all = known(values);
    if (!all.length) return [0, 1];
    let low = Math.min(...all);
    let high = Math.max(...all);
    if (low === high) {
      const room = Math.abs(low) * 0.1 || 0.5;
      low -= room;
      high += room;
    }
    const room = (high - low) * pad;
    return [low - room, high + room];
  }
  function linear(domain, range) {
    const scale = (x) =>
      range[0] + ((x - domain[0]) / (domain[1] - domain[0])) * (range[1] - range[0]);
    scale.ticks = (count) => {
      const raw = (domain[1] - domain[0]) / Math.max(count, 1);
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
      const ticks = [];
      for (let i = Math.ceil(domain[0] / step - 1e-9); i * step <= domain[1] + step * 1e-9; i++) {
        ticks.push([i * step, tickText(i * step, step === 2.5 * power ? step / 10 : step)]);
      }
      return ticks;
    };
    return scale;
  }
  function logarithmic(domain, range) {
    const inner = linear(domain.map(Math.log), range);
    const scale = (x) => inner(Math.log(x));
    scale.ticks = (count) => {
      const found = [];
      const decades = Math.log10(domain[1] / domain[0]);
      const steps = decades > count ? [1] : decades > 1.3 ? [1, 3] : [1, 2, 3, 5, 7];
      for (let p = Math.floor(Math.log10(domain[0])); p <= Math.log10(domain[1]); p++) {
        for (const m of steps) {
          const x = m * 10 ** p;
          if (x >= domain[0] && x <= domain[1]) found.push([x, tickText(x, 10 ** p)]);
        }
      }
      return found;
    };
    return scale;
  }
  function at(values, range) {
    // The values themselves as ticks: by ratio where all are above 0, else at equal distances.
    const scale = values[0] > 0
      ? logarithmic(extent(values.map(Math.log), 0.07).map(Math.exp), range)
      : linear([-0.4, values.length - 0.6], range);
    const place = values[0] > 0 ? scale : (x) => scale(values.indexOf(x));
    place.ticks = () => values.map((x) => [x, String(x)]);
    return place;
  }

  // Marks.
  function mark(parent, shape, x, y, r, colour, hollow = false) {
    const look = hollow
      ? `fill: var(--paper); stroke: ${colour}; stroke-width: 1.8`
      : `fill: ${colour}; stroke: var(--paper); stroke-width: 1`;
    if (shape === "circle") return make(parent, "circle", { cx: x, cy: y, r, style: look });
    const corners = {
      triangle: [[0, -1.15], [1.1, 0.8], [-1.1, 0.8]],
      wedge: [[0, 1.15], [1.1, -0.8], [-1.1, -0.8]],
      square: [[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]],
      diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    }[shape];
    const points = corners.map(([a, b]) => `${x + a * r},${y + b * r}`).join(" ");
    return make(parent, "polygon", { points, style: look });
  }
  function line(parent, x1, y1, x2, y2, attributes) {
    return make(parent, "line", { x1, y1, x2, y2, ...attributes });
  }
  function stroke(colour, width = 2) {
    return { style: `stroke: ${colour}; stroke-width: ${width}; fill: none` };
  }
  function path(points) {
    return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  }

  // A chart: drawn anew whenever its width or its content changes; values by pointer or arrow keys.
  const charts = new Map();
  const watcher = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const chart = charts.get(target);
      if (chart && Math.abs(contentRect.width - chart.width) > 0.5) show(target);
    }
  });
  function chart(host, label, draw) {
    const first = !charts.has(host);
    charts.set(host, { label, draw, width: 0, focus: -1 });
    if (first) watcher.observe(host);
    show(host);
  }
  function show(host) {
    const chart = charts.get(host);
    const width = host.clientWidth;
    chart.width = width;
    if (!width) return;
    const focused = host.contains(document.activeElement);
    host.replaceChildren();
    const svg = make(host, "svg", { role: "img", tabindex: 0, "aria-label": chart.label });
    const { height, points, note } = chart.draw(svg, width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    if (note) make(host, "p", { class: "note" }, note);
    chart.focus = -1;
    const halo = make(svg, "circle", { class: "halo", r: 8, visibility: "hidden" });
    const select = (place, near) => {
      chart.focus = place;
      const point = points[place];
      halo.setAttribute("visibility", point ? "visible" : "hidden");
      if (!point) return hideTip();
      halo.setAttribute("cx", point.x);
      halo.setAttribute("cy", point.y);
      const box = svg.getBoundingClientRect();
      const zoom = box.width / width;
      showTip(point.text, near || [box.left + point.x * zoom, box.top + point.y * zoom]);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const zoom = box.width / width;
      const x = (event.clientX - box.left) / zoom;
      const y = (event.clientY - box.top) / zoom;
      let best = -1;
      let least = 40 * 40;
      points.forEach((point, i) => {
        const far = (point.x - x) ** 2 + (point.y - y) ** 2;
        if (far < least) [least, best] = [far, i];
      });
      select(best, [event.clientX, event.clientY]);
    });
    svg.addEventListener("pointerleave", () => select(-1));
    svg.addEventListener("blur", () => select(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return select(-1);
      if (event.key === "Home") select(0);
      else if (event.key === "End") select(points.length - 1);
      else if (step) select((chart.focus + step + points.length) % points.length);
      else return;
      event.preventDefault();
    });
    if (focused) svg.focus();
  }
  function showTip(text, [x, y]) {
    tip.hidden = false;
    if (tip.textContent !== text) tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(6, x + 14), window.innerWidth - box.width - 6);
    const above = y - box.height - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : y + 16}px`;
  }
  function hideTip() {
    tip.hidden = true;
  }

  // Axes.
  function xAxis(svg, scale, [left, right], [top, bottom], title) {
    const ticks = scale.ticks(Math.max(2, Math.floor((right - left) / 70)));
    let last = -Infinity;
    for (const [value, text] of ticks) {
      const x = scale(value);
      line(svg, x, top, x, bottom, { class: "grid" });
      const half = text.length * 3.6;
      if (x - half < last + 6) continue;
      last = x + half;
      make(svg, "text", { x, y: bottom + 16, "text-anchor": "middle" }, text);
    }
    line(svg, left, bottom, right, bottom, { class: "axis" });
    const middle = (left + right) / 2;
    make(svg, "text", { x: middle, y: bottom + 34, "text-anchor": "middle" }, title);
  }
  function yAxis(svg, scale, [left, right], title) {
    for (const [value, text] of scale.ticks(5)) {
      const y = scale(value);
      line(svg, left, y, right, y, { class: "grid" });
      make(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text);
    }
    make(svg, "text", { x: 0, y: 11 }, title);
  }
  const ruler = document.createElement("canvas").getContext("2d");
  function textWidth(text, weight = 400) {
    ruler.font = `${weight} 12px ${getComputedStyle(document.body).fontFamily}`;
    return ruler.measureText(text).width;
  }
  function label(svg, x, y, text, room, look) {
    let cut = text;
    const weight = look === "group" ? 600 : 400;
    while (cut.length > 1 && textWidth(cut, weight) > room) cut = cut.slice(0, -1);
    const node = make(svg, "text", { x, y, class: look }, cut === text ? text : `${cut.slice(0, -1)}…`);
    if (cut !== text) make(node, "title", {}, text);
  }

  // Rows of marks with intervals, under headings: values, differences, effects and all tasks.
  function rows(svg, width, { groups, axis, zero, seeds, domain = [], names = [] }) {
    const all = groups.flatMap((group) => group.rows.flatMap((row) => row.marks));
    const numbers = all.flatMap((m) => [m.mean, m.low, m.high, ...(seeds ? m.values || [] : [])]);
    numbers.push(...domain);
    if (zero) numbers.push(0);
    // Names stand beside their marks, or above them where they would take too much of the width.
    const named = [...names, ...groups.flatMap((g) => g.rows.map((r) => r.name))];
    const widest = Math.max(0, ...named.map((name) => textWidth(name)));
    const stacked = widest > width * 0.46;
    const left = stacked ? 10 : widest + 14;
    const scale = linear(extent(numbers), [left, width - 8]);
    const plan = [];
    let y = 6;
    for (const group of groups) {
      if (group.name) {
        plan.push({ heading: group.name, y: y + 15 });
        y += 24;
      }
      for (const row of group.rows) {
        if (stacked) y += 15;
        const height = Math.max(22, 9 + row.marks.length * 13);
        plan.push({ row, y: y + height / 2, name: stacked ? y - 2 : y + height / 2 + 4 });
        y += height;
      }
      y += 6;
    }
    const bottom = y + 2;
    xAxis(svg, scale, [left, width - 8], [0, bottom], axis);
    if (zero) line(svg, scale(0), 0, scale(0), bottom, { class: "zero" });
    const points = [];
    for (const { heading, row, y: middle, name } of plan) {
      if (heading) {
        label(svg, 0, middle, heading, width, "group");
        continue;
      }
      label(svg, 0, name, row.name, stacked ? width : left, row.quiet ? "quiet" : "strong");
      row.marks.forEach((m, i) => {
        const at = middle + (i - (row.marks.length - 1) / 2) * 13;
        for (const value of seeds ? known(m.values || []) : []) {
          const x = scale(value);
          const look = `stroke: ${m.colour}; opacity: 0.55`;
          line(svg, x, at + 3, x, at + 9, { style: look });
        }
        if (m.mean === null) return;
        if (m.low !== null && m.high !== null) {
          line(svg, scale(m.low), at, scale(m.high), at, stroke(m.colour));
        }
        mark(svg, m.shape, scale(m.mean), at, 5, m.colour, m.hollow);
        points.push({ x: scale(m.mean), y: at, text: m.text });
      });
    }
    return { height: bottom + 42, points };
  }

  // Lines over a number, with bands or whiskers.
  function lines(svg, width, { series, x, title, xLabel, zero, whiskers, height = 260 }) {
    const left = 52;
    const numbers = series.flatMap((s) => [...s.mean, ...s.low, ...s.high]);
    const y = linear(extent(zero ? [...numbers, 0] : numbers), [height - 42, 22]);
    const xs = x([left, width - 10]);
    yAxis(svg, y, [left, width - 10], title);
    xAxis(svg, xs, [left, width - 10], [22, height - 42], xLabel);
    if (zero) line(svg, left, y(0), width - 10, y(0), { class: "zero" });
    const points = [];
    for (const s of series) {
      const seen = s.x.map((value, i) => i).filter((i) => s.mean[i] !== null);
      const bounded = seen.filter((i) => s.low[i] !== null && s.high[i] !== null);
      if (!whiskers && bounded.length > 1) {
        const edge = bounded.map((i) => [xs(s.x[i]), y(s.high[i])]);
        const back = bounded.map((i) => [xs(s.x[i]), y(s.low[i])]).reverse();
        const look = `fill: ${s.colour}; opacity: 0.14`;
        make(svg, "path", { d: `${path([...edge, ...back])}Z`, style: look });
      }
      const shift = whiskers ? s.shift : 0;
      const d = path(seen.map((i) => [xs(s.x[i]) + shift, y(s.mean[i])]));
      const dash = s.hollow ? { "stroke-dasharray": "4 3" } : {};
      make(svg, "path", { d, ...stroke(s.colour, whiskers ? 1.4 : 1.8), ...dash });
      if (whiskers) {
        for (const i of bounded) {
          const at = xs(s.x[i]) + shift;
          line(svg, at, y(s.low[i]), at, y(s.high[i]), stroke(s.colour));
        }
      }
      for (const i of seen) {
        const at = xs(s.x[i]) + shift;
        if (whiskers) mark(svg, s.shape, at, y(s.mean[i]), 4.5, s.colour, s.hollow);
        points.push({ x: at, y: y(s.mean[i]), text: s.text(i) });
      }
    }
    return { height, points };
  }

  function histogram(svg, width, { found, series, title }) {
    const height = 240;
    const left = 46;
    const ends = [found.edges[0], found.edges[found.edges.length - 1]];
    const xs = (found.log ? logarithmic : linear)(ends, [left, width - 10]);
    const most = Math.max(...series.flatMap((s) => s.shares), 1e-9);
    const y = linear([0, most * 1.06], [height - 42, 22]);
    yAxis(svg, y, [left, width - 10], "share of examples");
    xAxis(svg, xs, [left, width - 10], [22, height - 42], title);
    const points = [];
    for (const s of series) {
      const outline = [[xs(found.edges[0]), y(0)]];
      s.shares.forEach((share, i) => {
        outline.push([xs(found.edges[i]), y(share)], [xs(found.edges[i + 1]), y(share)]);
      });
      outline.push([xs(ends[1]), y(0)]);
      make(svg, "path", { d: path(outline), style: `fill: ${s.colour}; opacity: 0.12` });
      make(svg, "path", { d: path(outline), ...stroke(s.colour, 1.8) });
      const peak = s.shares.indexOf(Math.max(...s.shares));
      const middle = (xs(found.edges[peak]) + xs(found.edges[peak + 1])) / 2;
      points.push({ x: middle, y: y(s.shares[peak]), text: s.text(peak) });
    }
    return { height, points };
  }

  // A panel: its state, and how it is shown.
  function panel(article) {
    const d = data.panels[article.dataset.panel];
    if (!d || !d.treatment || !d.primary) return;
    const state = { metric: d.primary, context: 0, hidden: new Set() };
    const host = (kind) => article.querySelector(`[data-chart="${kind}"]`);
    const control = (kind) => article.querySelector(`[data-control="${kind}"]`);
    const levelName = (level) =>
      d.treatment === "cell" || d.treatment === "arm"
        ? d.levels[level]
        : `${d.treatment} ${d.levels[level]}`;
    const conditionName = (place) => {
      const [context, level] = d.conditions[place];
      return [levelName(level), d.contexts[context]].filter(Boolean).join(", ");
    };
    const shown = (place) => !state.hidden.has(d.conditions[place][1]);
    const here = (place) => shown(place) && d.conditions[place][0] === state.context;
    const where = () => (d.contexts[state.context] ? `, ${d.contexts[state.context]}` : "");

    function conditionMark(place, from, m, signed) {
      const style = d.styles[d.conditions[place][1]];
      const range = interval(from.low[place], from.high[place], m.decimals, signed);
      const text = `${conditionName(place)}\n${number(from.mean[place], m.decimals, signed)} ` +
        `${range}\n${seedCount(from.n[place])}`;
      return {
        mean: from.mean[place], low: from.low[place], high: from.high[place],
        values: m.values[place], ...style, text,
      };
    }
    function byContext(from, m, signed, skip) {
      return d.contexts
        .map((name, context) => ({
          name,
          rows: d.conditions
            .map(([c, level], place) => ({ c, level, place }))
            .filter(({ c, level, place }) => c === context && shown(place) && level !== skip)
            .map(({ level, place }) => ({
              name: d.levels[level],
              marks: [conditionMark(place, from, m, signed)],
            })),
        }))
        .filter((group) => group.rows.length);
    }
    function summary(m) {
      return d.conditions
        .map((_, place) => place)
        .filter(shown)
        .map((place) => `${conditionName(place)} ${number(m.mean[place], m.decimals)}`)
        .join("; ");
    }

    function table(m) {
      const caption = article.querySelector(".metric-name");
      if (caption) caption.textContent = state.metric;
      for (const row of article.querySelectorAll("tr[data-condition]")) {
        const place = Number(row.dataset.condition);
        const diff = m.difference;
        const missing = m.missing[place] ? ` (${m.missing[place]} missing)` : "";
        const texts = {
          mean: number(m.mean[place], m.decimals),
          interval: interval(m.low[place], m.high[place], m.decimals),
          seeds: `${m.n[place]}${missing}`,
          difference: number(diff.mean[place], m.decimals, true),
          "difference-interval": interval(diff.low[place], diff.high[place], m.decimals, true),
          crossed: interval(...(m.crossed?.[place] ?? [null, null]), m.decimals, true),
          effect: number(m.effect[place], 2, true),
          smallest: number(m.smallest[place], m.decimals),
        };
        for (const [name, text] of Object.entries(texts)) {
          const cell = row.querySelector(`.${name}`);
          if (cell) cell.textContent = text;
        }
        row.hidden = !shown(place);
      }
    }
    function square(m) {
      const cells = [...article.querySelectorAll("[data-square]")];
      if (!cells.length) return;
      const place = (level) =>
        d.conditions.findIndex(([c, l]) => c === state.context && l === level);
      const means = known(cells.map((cell) => m.mean[place(Number(cell.dataset.square))]));
      const [low, high] = [Math.min(...means), Math.max(...means)];
      for (const cell of cells) {
        const level = Number(cell.dataset.square);
        const i = place(level);
        const mean = i < 0 ? null : m.mean[i];
        cell.querySelector(".value").textContent = number(mean, m.decimals);
        cell.querySelector(".range").textContent =
          i < 0 ? "" : interval(m.low[i], m.high[i], m.decimals);
        const share = mean === null || high === low ? 0 : (mean - low) / (high - low);
        cell.style.setProperty("--share", share.toFixed(3));
        cell.classList.toggle("off", state.hidden.has(level));
      }
      const found = m.squares[state.context];
      const names = { left: "left norm", right: "right norm", interaction: "interaction" };
      const list = Object.entries(names).map(([key, name]) => {
        const [mean, low, high, n] = found ? found[key] : [null, null, null, 0];
        const text = `Discarding the ${name}: ${number(mean, m.decimals, true)} ` +
          `${interval(low, high, m.decimals, true)}\n${seedCount(n)}`;
        const look = { colour: "var(--ink)", shape: "circle" };
        return { name, marks: [{ mean, low, high, ...look, text }] };
      });
      const label = `Effects of discarding norms on ${state.metric}${where()}: ` +
        list.map((row) => row.marks[0].text.replace("\n", ", ")).join("; ");
      chart(host("effects"), label, (svg, width) => ({
        ...rows(svg, width, {
          groups: [{ name: "", rows: list }], axis: `change of ${state.metric}`, zero: true,
        }),
        note: "Left and right: mean of the two cells that discard the norm minus mean of the two " +
          "that keep it. Interaction: the left effect where right is discarded minus where kept.",
      }));
    }
    function curves() {
      const name = control("curve")?.value;
      if (!name) return;
      const mine = d.curves[name].filter((s) => here(s.condition));
      const decimals = 4;
      const series = mine.map((s) => ({
        ...s, ...d.styles[d.conditions[s.condition][1]],
        text: (i) => `${conditionName(s.condition)}\n${d.over} ${s.x[i]}\n` +
          `${number(s.mean[i], decimals)} ${interval(s.low[i], s.high[i], decimals)}`,
      }));
      const last = series
        .map((s) => `${conditionName(s.condition)} ends at ${number(s.mean.at(-1), decimals)}`)
        .join("; ");
      chart(host("curves"), `${name} over ${d.over}${where()}: ${last}`, (svg, width) =>
        lines(svg, width, {
          series, title: name, xLabel: d.over === "samples" ? "samples seen" : "step",
          x: (range) => linear(extent(series.flatMap((s) => s.x), 0.01), range),
        }));
    }
    function along(target) {
      const kind = target.dataset.chart;
      const gain = kind === "along-gain";
      const metric = kind === "along-variance" ? "train/negative_variance" : state.metric;
      const m = d.metrics[metric];
      const source = gain ? m.difference : m;
      const { factor, groups, ofLevels } = d.along;
      const part = Number(target.dataset.group);
      const group = groups[part];
      const place = (context, level) =>
        d.conditions.findIndex(([c, l]) => c === context && l === level);
      const series = [];
      // Levels as lines over contexts; or, where the treatment itself is the number, one line.
      for (const level of ofLevels ? [d.baseline] : d.levels.keys()) {
        if (!ofLevels && (state.hidden.has(level) || (gain && level === d.baseline))) continue;
        const places = group.members
          .map(([x, member]) => [x, ofLevels ? place(part, member) : place(member, level)])
          .filter(([, i]) => i >= 0 && shown(i));
        const pick = (key) => places.map(([, i]) => source[key][i]);
        const name = ofLevels ? metric : levelName(level);
        series.push({
          ...d.styles[level], name, x: places.map(([x]) => x),
          mean: pick("mean"), low: pick("low"), high: pick("high"),
          text: (i) => `${name}\n${factor} ${places[i][0]}\n` +
            `${number(pick("mean")[i], m.decimals, gain)} ` +
            `${interval(pick("low")[i], pick("high")[i], m.decimals, gain)}`,
        });
      }
      for (const r of kind === "along-variance" ? d.reference : []) {
        const level = d.levels.indexOf(r.level);
        if (level < 0 || state.hidden.has(level)) continue;
        const none = r.x.map(() => null);
        series.push({
          ...d.styles[level], name: r.name, x: r.x, mean: r.y, low: none, high: none, hollow: true,
          text: (i) => `${r.name}\n${factor} ${r.x[i]}\n${number(r.y[i], 4)}`,
        });
      }
      const values = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
      series.forEach((s, i) => { s.shift = (i - (series.length - 1) / 2) * 5; });
      const spoken = series.map((s) => `${s.name}: ` +
        s.x.map((x, i) => `${x} ${number(s.mean[i], m.decimals, gain)}`).join(", "));
      const about = `${metric}${gain ? ", gain over the baseline," : ""} against ${factor}. `;
      const published = series.filter((s) => s.hollow).map((s) => s.name);
      chart(target, about + spoken.join("; "), (svg, width) => ({
        ...lines(svg, width, {
          series, title: gain ? `change of ${metric}` : metric, xLabel: factor, zero: gain,
          whiskers: true, x: (range) => at(values, range),
        }),
        note: published.length ? `Hollow: ${published.join("; ")}.` : "",
      }));
    }
    function norms() {
      const outcome = control("outcome")?.value;
      if (!outcome) return;
      const found = d.histograms.find((h) => h.outcome === outcome && h.context === state.context);
      const target = host("norms");
      if (!found) {
        charts.delete(target);
        target.replaceChildren();
        make(target, "p", { class: "note" }, "No norms were kept in this setting.");
        return;
      }
      const series = Object.entries(found.shares)
        .filter(([level]) => !state.hidden.has(Number(level)))
        .map(([level, shares]) => ({
          ...d.styles[level], shares, level,
          text: (i) => `${levelName(level)}\nmost norms between ${number(found.edges[i], 3)} and ` +
            `${number(found.edges[i + 1], 3)}\nvariation (CV) ${number(found.cv[level], 3)}`,
        }));
      const label = `Histogram of ${outcome}${where()}: ` +
        series.map((s) => `${levelName(s.level)} CV ${number(found.cv[s.level], 3)}`).join("; ");
      chart(target, label, (svg, width) => ({
        ...histogram(svg, width, { found, series, title: found.log ? `${outcome} (log scale)` : outcome }),
        note: "Coefficient of variation inside a run: " + series
          .map((s) => `${levelName(s.level)} ${number(found.cv[s.level], 3)}`).join(", ") + ".",
      }));
    }

    function update() {
      const m = d.metrics[state.metric];
      table(m);
      const name = state.metric;
      chart(host("values"), `${name}: ${summary(m)}`, (svg, width) =>
        rows(svg, width, { groups: byContext(m, m, false, -1), axis: name, seeds: true }));
      chart(host("differences"), `${name}, paired differences: see the table`, (svg, width) =>
        rows(svg, width, {
          groups: byContext(m.difference, m, true, d.baseline), axis: `change of ${name}`, zero: true,
        }));
      square(m);
      article.querySelectorAll('[data-chart^="along"]').forEach(along);
      curves();
      norms();
      for (const span of article.querySelectorAll(".where")) span.textContent = where();
      for (const map of article.querySelectorAll("[data-context]")) {
        map.hidden = Number(map.dataset.context) !== state.context;
      }
    }

    control("metric").addEventListener("change", (event) => {
      state.metric = event.target.value;
      update();
    });
    control("context")?.addEventListener("change", (event) => {
      state.context = Number(event.target.value);
      update();
    });
    control("curve")?.addEventListener("change", curves);
    control("outcome")?.addEventListener("change", norms);
    for (const button of article.querySelectorAll("button[data-level]")) {
      button.addEventListener("click", () => {
        const level = Number(button.dataset.level);
        const hide = button.getAttribute("aria-pressed") === "true";
        if (hide && state.hidden.size === d.levels.length - 1) return;
        button.setAttribute("aria-pressed", String(!hide));
        hide ? state.hidden.add(level) : state.hidden.delete(level);
        update();
      });
    }
    for (const key of article.querySelectorAll(".key")) {
      drawKey(key, d.styles[Number(key.dataset.level)]);
    }
    update();
  }
  function drawKey(host, { shape, colour }, hollow = false) {
    const svg = make(host, "svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" });
    mark(svg, shape, 6, 6, 4.6, colour, hollow);
  }

  // All tasks beside each other.
  function comparisons() {
    const style = (cell) => ({ colour: `var(--${cell})`, shape: SHAPES[CELLS.indexOf(cell)] });
    const cells = CELLS.filter((cell) => data.comparisons.some((c) => c.cell === cell));
    for (const legend of document.querySelectorAll('[data-legend="cells"]')) {
      const key = (text, look, hollow) => {
        const item = make(legend, "span");
        drawKey(make(item, "span", { class: "key" }), look, hollow);
        item.append(text);
      };
      for (const cell of cells) key(cell, style(cell));
      if (cells.length) key("published", { colour: "var(--muted)", shape: "circle" }, true);
    }
    // One axis for all kinds, so that they can be compared by eye.
    const numbers = data.comparisons.flatMap((c) => [c.mean, c.low, c.high]);
    const names = data.comparisons.map((c) => c.where);
    for (const host of document.querySelectorAll('[data-chart="comparisons"]')) {
      const mine = data.comparisons.filter((c) => c.kind === host.dataset.kind);
      const tasks = new Map();
      for (const c of mine) {
        const ours = c.source === "ours";
        if (!tasks.has(c.task)) tasks.set(c.task, new Map());
        const places = tasks.get(c.task);
        if (!places.has(c.where)) places.set(c.where, { name: c.where, quiet: !ours, marks: [] });
        const basis = ours ? seedCount(c.n) : `published in ${c.source}, no interval`;
        places.get(c.where).marks.push({
          ...style(c.cell), mean: c.mean, low: c.low, high: c.high, hollow: !ours, cell: c.cell,
          text: `${c.cell} against cosine\n${c.task}: ${c.where}\n${c.metric}, ln ratio ` +
            `${number(c.mean, 3, true)} ${interval(c.low, c.high, 3, true)}\n${basis}`,
        });
      }
      const order = (a, b) => CELLS.indexOf(a.cell) - CELLS.indexOf(b.cell);
      const list = [...tasks].map(([name, places]) => ({ name, rows: [...places.values()] }));
      for (const group of list) for (const row of group.rows) row.marks.sort(order);
      const label = `Each cell against cosine, ${host.dataset.kind} tasks; the table below has ` +
        "every number.";
      chart(host, label, (svg, width) =>
        rows(svg, width, { groups: list, axis: "ln(cell / cosine)", zero: true, domain: numbers, names }));
    }
  }

  // Claims: the interval beside its margin.
  function sparks() {
    for (const host of document.querySelectorAll(".spark")) {
      const [mean, low, high, margin] = ["mean", "low", "high", "margin"].map((key) =>
        host.dataset[key] === undefined ? null : Number(host.dataset[key]));
      const far = Math.max(...known([mean, low, high, margin && margin * 1.4].map(
        (x) => (x === null ? null : Math.abs(x))))) || 1;
      const scale = linear([-far * 1.08, far * 1.08], [0, 180]);
      const svg = make(host, "svg", { width: 180, height: 18, viewBox: "0 0 180 18", role: "img" });
      svg.setAttribute("aria-label", margin ? `Interval beside the margin of ${margin}` : "Interval");
      if (margin) {
        const width = scale(margin) - scale(-margin);
        make(svg, "rect", { class: "zone", x: scale(-margin), y: 1, width, height: 16, rx: 2 });
      }
      line(svg, scale(0), 0, scale(0), 18, { class: "axis" });
      if (low !== null && high !== null) {
        line(svg, scale(low), 9, scale(high), 9, { class: "bar" });
      }
      make(svg, "circle", { class: "mark", cx: scale(mean), cy: 9, r: 4 });
    }
  }
  function verdicts() {
    const select = document.getElementById("verdicts");
    const rows = [...document.querySelectorAll("tr[data-verdict]")];
    select?.addEventListener("change", () => {
      for (const row of rows) {
        row.hidden = select.value !== "" && row.dataset.verdict !== select.value;
      }
      for (const group of document.querySelectorAll("#board ~ details")) {
        const any = [...group.querySelectorAll("tr[data-verdict]")].some((row) => !row.hidden);
        group.hidden = !any;
        if (select.value && any) group.open = true;
      }
    });
  }

  function theme() {
    const root = document.documentElement;
    const button = document.getElementById("theme");
    const wanted = window.matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wanted.matches);
    const label = () => {
      button.textContent = isDark() ? "Light theme" : "Dark theme";
      button.setAttribute("aria-pressed", String(isDark()));
    };
    try {
      const stored = localStorage.getItem("offsphere-theme");
      if (stored === "dark" || stored === "light") root.dataset.theme = stored;
    } catch { /* a page from a file may have no storage */ }
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("offsphere-theme", root.dataset.theme);
      } catch { /* as above */ }
      label();
    });
    wanted.addEventListener("change", label);
    label();
  }

  theme();
  if (window.matchMedia("(max-width: 70rem)").matches) {
    document.querySelector("nav details").open = false;
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  verdicts();
  sparks();
  comparisons();
  for (const article of document.querySelectorAll("[data-panel]")) panel(article);
})();
