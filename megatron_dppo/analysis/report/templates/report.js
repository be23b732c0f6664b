(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const looks = {{ looks }};
  const numColours = {{ num_colours }};

  function themedTrace(trace) {
    const colour = style(`--${trace.legendgroup ?? `run-${looks[trace.meta] % numColours}`}`);
    const line = trace.type === "bar" ? {} : { line: { ...trace.line, color: colour } };
    const numbers = trace.type === "bar" && innerWidth < 600 ? { texttemplate: "" } : {}; // too few would fit
    return { ...trace, ...line, ...numbers, marker: { ...trace.marker, color: colour }, visible: !hidden.has(trace.meta), showlegend: false };
  }

  function themedLayout(layout) {
    const themed = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style("--soft") },
      hoverlabel: { namelength: -1, bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") } },
      dragmode: touch ? false : "zoom",
      annotations: layout.annotations.map((a) => ({ ...a, font: { size: 13, color: style("--ink") } })),
      shapes: layout.shapes.map((s) => ({ ...s, visible: !hidden.has(Number(s.name)), line: { ...s.line, color: style(`--run-${looks[s.name] % numColours}`) } })),
    };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      themed[key] = { ...layout[key], gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line") };
    }
    return themed;
  }

  const plots = [...document.querySelectorAll("[data-figure]")];
  const numCurves = Object.values(figures).reduce((sum, figure) => sum + figure.data.length, 0);
  const folded = plots.filter((plot) => plot.closest("details"));
  const waiting = new Set(numCurves > 300 ? plots : folded); // of many, those are drawn that come into view
  const nearby = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting && waiting.delete(target)) drawOne(target);
  }, { rootMargin: "400px" });
  for (const plot of waiting) {
    plot.style.minHeight = `${figures[plot.dataset.figure].layout.height}px`;
    nearby.observe(plot);
  }

  function drawOne(plot) {
    const { data, layout } = figures[plot.dataset.figure];
    Plotly.react(plot, data.map(themedTrace), themedLayout(layout), { responsive: true, displayModeBar: false });
  }

  function draw() {
    for (const plot of plots) if (!waiting.has(plot)) drawOne(plot);
  }

  const buttons = [...document.querySelectorAll("[data-run]")];
  const all = document.querySelector("[data-all]");

  function show(button, isShown) {
    for (const run of button.dataset.run.split(" ").map(Number)) isShown ? hidden.delete(run) : hidden.add(run);
    button.setAttribute("aria-pressed", String(isShown));
  }

  function update() {
    if (all) all.textContent = hidden.size === looks.length ? "Show all" : "Hide all";
    draw();
  }

  for (const button of buttons) {
    button.addEventListener("click", () => {
      show(button, button.getAttribute("aria-pressed") === "false");
      update();
    });
  }
  all?.addEventListener("click", () => {
    const isShown = hidden.size === looks.length;
    for (const button of buttons) show(button, isShown);
    update();
  });
  dark.addEventListener("change", draw);
  addEventListener("beforeprint", () => {
    for (const plot of waiting) drawOne(plot);
    waiting.clear();
  });
  draw();
})();
