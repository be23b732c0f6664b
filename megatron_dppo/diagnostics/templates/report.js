(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const numColours = {{ num_colours }};

  function themedTrace(trace) {
    const colour = style(`--run-${trace.meta % numColours}`);
    const line = trace.type === "bar" ? {} : { line: { ...trace.line, color: colour } };
    return { ...trace, ...line, marker: { ...trace.marker, color: colour }, visible: !hidden.has(trace.meta), showlegend: false };
  }

  function themedLayout(layout) {
    const themed = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style("--soft") },
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink") } },
      dragmode: touch ? false : "zoom",
      annotations: layout.annotations.map((a) => ({ ...a, font: { size: 13, color: style("--ink") } })),
    };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      themed[key] = { ...layout[key], gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line") };
    }
    return themed;
  }

  function draw() {
    for (const element of document.querySelectorAll("[data-figure]")) {
      const { data, layout } = figures[element.dataset.figure];
      Plotly.react(element, data.map(themedTrace), themedLayout(layout), { responsive: true, displayModeBar: false });
    }
  }

  for (const button of document.querySelectorAll("[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      draw();
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();
