"use strict";
(() => {
  const tip = document.getElementById("tip");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const named = (name) => document.querySelector(`script[data-store="${CSS.escape(name)}"]`);

  // Stores: compressed JSON, unpacked when something of it is first looked at.
  const opened = new Map();
  function once(key, make) {
    if (!opened.has(key)) opened.set(key, make());
    return opened.get(key);
  }
  async function unpacked(name) {
    const bytes = Uint8Array.from(atob(named(name).textContent), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }
  const library = () => once("library", async () => {
    const script = document.createElement("script");
    script.textContent = await unpacked("library");
    document.head.append(script);
  });
  const store = (name) => once(`store ${name}`, async () => {
    const found = JSON.parse(await unpacked(name));
    for (const [key, columns] of Object.entries(found.data)) {
      const names = Object.keys(columns);
      const rows = columns[names[0]] || [];
      found.data[key] = rows.map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]])));
    }
    return found;
  });

  // Charts are drawn one after the other, each when it comes near the window.
  const views = new Map();
  let turn = Promise.resolve();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      turn = turn.then(() => draw(target)).then(() => new Promise((next) => setTimeout(next)));
    }
  }, { rootMargin: "250px" });
  async function draw(host) {
    const found = await store(host.dataset.from);
    await library();
    const { [host.dataset.chart]: spec } = found.charts;
    // Names of rows leave most of a narrow window to the marks.
    const axis = { ...chartConfig.axis, labelLimit: Math.min(420, host.clientWidth * 0.45) };
    const config = { ...chartConfig, axis };
    const { view } = await vegaEmbed(host, { ...spec, config, datasets: found.data }, {
      mode: "vega-lite", renderer: "svg", ast: true, logLevel: 1, actions: false, defaultStyle: false,
      tooltip: (_handler, event, _item, text) => show(text, [event.clientX, event.clientY]),
    });
    views.set(host, view);
    fill(host.closest("[data-panel]")?.querySelector('select[data-signal="metric"]'), found.tables);
    for (const [name, value] of Object.entries(chosen(host.closest("[data-panel]")))) {
      signal(view, name, value);
    }
    host.dataset.drawn = "true";
  }
  function fill(select, tables) {
    for (const [value, { name }] of Object.entries(select?.length === 1 ? tables : {})) {
      if (value !== select[0].value) select.add(new Option(name, value));
    }
  }
  function signal(view, name, value) {
    // A chart that does not depend on a choice has no signal of its name.
    if (name in view.getState({ data: () => false, signals: () => true }).signals) {
      view.signal(name, value).runAsync();
    }
  }

  // Values of a chart by the arrow keys: its marks tell what they are.
  function walk(host, event) {
    const marks = all('[role="graphics-symbol"][aria-label]', host);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!marks.length || (!step && !["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    const last = marks.indexOf(host.mark);
    const next = step ? Math.max(last, step < 0 ? 0 : -1) + step : event.key === "Home" ? 0 : -1;
    host.mark = marks.at(next % marks.length);
    const box = host.mark.getBoundingClientRect();
    show(host.mark.getAttribute("aria-label"), [box.left + box.width / 2, box.top + box.height / 2]);
  }
  function show(text, [x, y]) {
    tip.hidden = !text;
    if (!text) return;
    if (tip.textContent !== text) tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const above = y - box.height - 12;
    tip.style.left = `${Math.min(Math.max(6, x + 14), window.innerWidth - box.width - 6)}px`;
    tip.style.top = `${above > 4 ? above : y + 16}px`;
  }
  const hide = () => show("", [0, 0]);

  // A panel's choices: each is a signal of its charts; a metric has a table too.
  function chosen(panel) {
    if (!panel) return {};
    const values = all("select[data-signal]", panel).map((s) => [s.dataset.signal, s.value]);
    const hidden = all('button[data-level][aria-pressed="false"]', panel);
    return Object.fromEntries([...values, ["hidden", hidden.map((b) => b.dataset.level)]]);
  }
  async function choose(panel) {
    const values = chosen(panel);
    for (const host of all("[data-chart]", panel)) {
      for (const [name, value] of Object.entries(values)) {
        if (views.has(host)) signal(views.get(host), name, value);
      }
    }
    const place = panel.querySelector("[data-table]");
    const table = place && values.metric && (await store(panel.dataset.panel)).tables[values.metric];
    if (table) {
      place.querySelector(".metric-name").textContent = table.name;
      all("tr[data-level]", place).forEach((row, i) => {
        all("td", row).forEach((cell, j) => { cell.textContent = table.rows[i][j + 1]; });
      });
    }
    for (const row of all("tr[data-level]", panel)) row.hidden = values.hidden.includes(row.dataset.level);
  }
  function panels() {
    for (const panel of all("[data-panel]")) {
      panel.addEventListener("change", () => choose(panel));
      for (const button of all("button[data-level]", panel)) {
        button.addEventListener("click", () => {
          const pressed = all('button[data-level][aria-pressed="true"]', panel);
          if (pressed.length === 1 && pressed[0] === button) return;
          button.setAttribute("aria-pressed", String(!pressed.includes(button)));
          choose(panel);
        });
      }
    }
  }

  // Claims by verdict, and those that rest on enough seeds and steps.
  function claims() {
    const controls = all("[data-least], [data-equal]");
    const rows = all("[data-claim]");
    const fits = (row) => controls.every(({ value, dataset: { least, equal } }) =>
      !value || (least ? Number(row.dataset[least]) >= Number(value) : row.dataset[equal] === value));
    const apply = () => {
      for (const row of rows) row.hidden = !fits(row);
      for (const group of all("[data-claims]")) {
        const inside = all("[data-claim]", group);
        const left = inside.filter((row) => !row.hidden).length;
        group.querySelector(".left").textContent =
          left === inside.length ? "" : `, ${left} shown`;
        if (left && left < inside.length && group.tagName === "DETAILS") group.open = true;
      }
    };
    for (const control of controls) control.addEventListener("change", apply);
  }

  function theme() {
    const root = document.documentElement;
    const button = document.getElementById("theme");
    const wanted = window.matchMedia("(prefers-color-scheme: dark)");
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wanted.matches);
    const label = () => {
      button.textContent = dark() ? "Light theme" : "Dark theme";
      button.setAttribute("aria-pressed", String(dark()));
    };
    try {
      const kept = localStorage.getItem("offsphere-theme");
      if (kept === "dark" || kept === "light") root.dataset.theme = kept;
    } catch { /* a page from a file may have no storage */ }
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      try {
        localStorage.setItem("offsphere-theme", root.dataset.theme);
      } catch { /* as above */ }
      label();
    });
    wanted.addEventListener("change", label);
    label();
  }

  // A link leads to what is folded, too.
  function unfold() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.tagName === "DETAILS") target.open = true;
    for (let at = target.parentElement; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") at.open = true;
    }
    target.scrollIntoView();
  }

  theme();
  panels();
  claims();
  for (const host of all("[data-chart]")) {
    watcher.observe(host);
    host.addEventListener("keydown", (event) => walk(host, event));
    host.addEventListener("blur", () => { host.mark = null; hide(); });
    host.addEventListener("pointerleave", hide);
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  window.addEventListener("hashchange", unfold);
  unfold();
})();
