"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = new Map(Object.values(data.palette));
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  const drawn = new Map();

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // Figures are made with light colours; in the dark each is swapped for its partner.
  function coloured(value) {
    if (!isDark()) return value;
    if (typeof value === "string") return dark.get(value) ?? value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item)]));
    return value;
  }

  // plotly takes a second to read: tables come first, and it when a chart comes near, or when nothing else is to do.
  function plotly() {
    if (!window.Plotly) {
      const script = document.createElement("script");
      script.textContent = document.getElementById("plotly").textContent;
      document.head.append(script);
    }
    return window.Plotly;
  }

  function draw(element, figure) {
    drawn.set(element, figure);
    const layout = { ...structuredClone(figure.layout), autosize: true };
    plotly().react(element, coloured(structuredClone(figure.data)), coloured(layout), config);
    element.dataset.drawn = isDark() ? "dark" : "light";
  }

  function trajectory(page, key) {
    const { templates, configs, keys } = data.search[page];
    const colours = ["served", "runner_up", "good", "fifth", "inconclusive", "native"].map((n) => data.palette[n][0]);
    const symbols = ["circle", "square", "diamond", "triangle-up", "pentagon", "star"];
    const trials = keys[key];
    const traces = [];
    templates.forEach((template, index) => {
      const mine = trials.filter((trial) => trial[1] === index && trial[3] !== null);
      if (!mine.length) return;
      traces.push({
        type: "scatter", mode: "markers", name: template,
        x: mine.map((t) => t[0]), y: mine.map((t) => t[3]), text: mine.map((t) => configs[t[2]].replaceAll(", ", "<br>")),
        marker: { color: colours[index % colours.length], symbol: symbols[index % symbols.length], size: 9 },
        hovertemplate: "trial %{x}: %{y:.3f}x<br>%{text}<extra>" + template + "</extra>",
      });
    });
    const best = [];
    let lead = null;
    for (const trial of trials) {
      if (trial[3] !== null && (lead === null || trial[3] > lead)) lead = trial[3];
      best.push(lead);
    }
    traces.push({
      type: "scatter", mode: "lines", name: "best so far", x: trials.map((t) => t[0]), y: best, hoverinfo: "skip",
      line: { shape: "hv", width: 1.5, color: data.palette.muted[0] },
    });
    const failed = trials.filter((trial) => trial[3] === null);
    if (failed.length)
      traces.push({
        type: "scatter", mode: "markers", name: "failed", cliponaxis: false, x: failed.map((t) => t[0]), y: failed.map(() => 0),
        text: failed.map((t) => templates[t[1]] + ": " + t[4]), hovertemplate: "trial %{x}: %{text}<extra></extra>",
        marker: { color: data.palette.bad[0], symbol: "x-thin", size: 9, line: { width: 2, color: data.palette.bad[0] } },
      });
    const axis = { gridcolor: data.palette.grid[0], zeroline: false, automargin: true, fixedrange: true };
    const title = (text) => ({ text, font: { size: 13, color: data.palette.muted[0] }, standoff: 8 });
    return {
      data: traces,
      layout: {
        height: 340, margin: { l: 8, r: 12, t: 36, b: 44 }, dragmode: false,
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 13, color: data.palette.ink[0] },
        legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
        hoverlabel: { bgcolor: data.palette.surface[0], bordercolor: data.palette.line[0], font: { color: data.palette.ink[0] } },
        xaxis: { ...axis, title: title("trial") },
        yaxis: { ...axis, title: title("speedup in the search"), rangemode: "tozero" },
        shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: data.palette.muted[0], width: 1 } }],
      },
    };
  }

  function pick(select) {
    draw(document.getElementById(select.dataset.search + "-trajectory"), trajectory(select.dataset.search, select.value));
  }

  // A chart is drawn when it comes near the screen: the page answers at once, however many there are.
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      if (data.figures[target.id]) draw(target, data.figures[target.id]);
      else pick(document.querySelector(`select[data-search="${target.id.replace(/-trajectory$/, "")}"]`));
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll(".chart").forEach((element) => seen.observe(element));
  document.querySelectorAll("select[data-search]").forEach((select) => select.addEventListener("change", () => pick(select)));
  addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach((element) => {
    if (!drawn.has(element) && data.figures[element.id]) draw(element, data.figures[element.id]);
  }));

  // Amdahl's law, as fibc/reporting/worth.py has it; the reader moves f.
  function estimate(box) {
    const speedup = Number(box.dataset.speedup);
    const f = box.querySelector("input").valueAsNumber / 100;
    const gain = f * (1 - 1 / speedup);
    const delta = (f * Number(box.dataset.dispatchNs)) / (Number(box.dataset.nativeUs) * 1e3);
    box.querySelector("output").textContent =
      `f = ${(f * 100).toFixed(0)} %: the application ${(1 / (1 - gain + delta)).toFixed(3)}x as fast`;
  }
  document.querySelectorAll(".whatif").forEach((box) => {
    box.querySelector("input").addEventListener("input", () => estimate(box));
    estimate(box);
  });

  function repaint() {
    button.textContent = isDark() ? "Light" : "Dark";
    for (const [element, figure] of drawn) draw(element, figure);
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  });
  system.addEventListener("change", repaint);
  repaint();
  root.dataset.ready = "yes";
  requestIdleCallback(plotly);
})();
