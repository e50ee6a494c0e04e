"""The look of a page: its style sheet, and the script of its filter boxes."""

STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --page: #fbfbf9; --card: #fff; --line: #d9dde2;
  --gain: #1668a8; --loss: #c2570c; --shared: #7a7f87; --bad: #b3131b; --warn: #8a5a00;
  --wash: #eef4fa; --hue1: #1668a8; --hue2: #c2570c; --hue3: #1b7f5c; --hue4: #9a3f8f;
  --hue5: #8a6d00; --hue6: #3b4252; --hue7: #0f8ba0; --hue8: #b3313f; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --soft: #a3adb8; --page: #14171b; --card: #1c2026; --line: #353c45;
    --gain: #6cb6f5; --loss: #f59f57; --shared: #9aa3ad; --bad: #ff8080; --warn: #e6b450;
    --wash: #1b2733; --hue1: #6cb6f5; --hue2: #f59f57; --hue3: #5fd0a5; --hue4: #dd92d4;
    --hue5: #dcc25a; --hue6: #c3cbd6; --hue7: #56cfe1; --hue8: #ff8f98; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem; color: var(--ink);
  background: var(--page); font: 1rem/1.58 system-ui, -apple-system, "Segoe UI", sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0; }
h2 { font-size: 1.45rem; margin: 3.2rem 0 .6rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); letter-spacing: -.01em; }
h3 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p, ul { max-width: 48rem; margin: .5rem 0; }
a { color: var(--gain); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 1.1rem 0 0; font-size: .92rem; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
.answer { font-size: clamp(1.35rem, 1rem + 1.8vw, 2.05rem); line-height: 1.27; font-weight: 680;
  letter-spacing: -.015em; max-width: 56rem; margin: .5rem 0 .9rem; }
.tiles { display: grid; gap: .8rem; margin: 1.2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.8rem), 1fr)); }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .7rem;
  padding: .7rem 1rem .8rem; }
.tile strong { display: block; font-size: 1.7rem; line-height: 1.25; font-weight: 680;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .88rem; line-height: 1.35; display: block; }
.bad { color: var(--bad); font-weight: 700; }
.badge { display: inline-block; color: var(--warn); border: 1px solid; border-radius: .3rem;
  padding: 0 .4rem; font-size: .8rem; font-weight: 600; white-space: normal; }
.note, figcaption, caption, .label { color: var(--soft); font-size: .9rem; }
.label { margin-top: 1rem; font-weight: 600; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .7rem;
  padding: .9rem 1.2rem; margin: 1rem 0; }
.means { background: var(--wash); border-radius: .7rem; padding: .8rem 1.1rem; max-width: 56rem; }
.symbols { font-family: "Cambria Math", "STIX Two Math", Cambria, Georgia, serif;
  font-size: 1.05rem; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  margin: .6rem 0; }
th, td { padding: .42rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
thead th { color: var(--soft); font-size: .85rem; font-weight: 600; vertical-align: bottom; }
tbody tr:hover { background: var(--wash); }
th:first-child { text-align: left; }
td { white-space: nowrap; }
.cards tbody th { min-width: 9.5rem; }
.small { width: auto; font-size: .9rem; }
.facts th, .facts td { text-align: left; white-space: normal; font-weight: 400; }
.facts tbody th { color: var(--soft); white-space: nowrap; }
.facts { font-size: .92rem; }
.facts.short { width: auto; } .facts.short thead { display: none; }
.charts { display: grid; gap: 1.2rem 1.6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
.charts.wide { grid-template-columns: 1fr; }
figure { margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: .7rem; padding: .8rem 1rem .7rem; }
figcaption { font-weight: 600; color: var(--ink); margin-bottom: .5rem; line-height: 1.35; }
.chart { width: 100%; min-height: 6rem; }
.chart.vega-embed { display: block; padding: 0; }
.chart svg { display: block; max-width: 100%; height: auto; overflow: visible; }
.chart svg text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
.vega-bind, .vega-embed details { display: none; }
#vg-tooltip-element { position: fixed; z-index: 9; visibility: hidden; pointer-events: none;
  background: var(--card); color: var(--ink); border: 1px solid var(--line);
  border-radius: .5rem; padding: .45rem .65rem; font-size: .84rem; line-height: 1.35;
  box-shadow: 0 .3rem 1.2rem rgb(0 0 0 / .18); max-width: 22rem; overflow-wrap: anywhere; }
#vg-tooltip-element.visible { visibility: visible; }
#vg-tooltip-element table { margin: 0; width: auto; }
#vg-tooltip-element tr:hover { background: none; }
#vg-tooltip-element td { border: 0; padding: .05rem 0; text-align: left; white-space: normal; }
#vg-tooltip-element td.key { color: var(--soft); padding-right: .8rem; white-space: nowrap; }
#vg-tooltip-element td.value { font-weight: 600; }
.filter { font: inherit; width: min(100%, 22rem); padding: .4rem .7rem; margin: .4rem 0;
  color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
.filter:focus { outline: 2px solid var(--gain); outline-offset: 1px; }
.list { max-height: 28rem; overflow: auto; }
.list thead th { position: sticky; top: 0; background: var(--page); }
.up { color: var(--gain); } .down { color: var(--loss); }
summary { cursor: pointer; color: var(--soft); font-size: .92rem; padding: .3rem 0; }
pre { overflow-x: auto; font-size: .82rem; line-height: 1.45; white-space: pre-wrap; }
dt { font-weight: 650; margin-top: .7rem; } dd { margin: .1rem 0 0; max-width: 46rem; }
@media screen and (max-width: 44rem) {
  body { padding: 1.2rem .9rem 3rem; }
  figure { padding: .7rem .6rem .5rem; }
  .cards thead { position: absolute; clip-path: inset(50%); height: 1px; overflow: hidden; }
  .cards tr { display: block; border: 1px solid var(--line); border-radius: .6rem;
    margin: .6rem 0; padding: .3rem .2rem; background: var(--card); }
  .cards th, .cards td { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    padding: .2rem .7rem; }
  .cards th { flex-direction: column; gap: 0; }
  .cards td::before { content: attr(data-label); color: var(--soft); text-align: left;
    white-space: normal; } }
@media print {
  html { font-size: 9.5pt; } body { max-width: none; padding: 0; background: none; }
  nav, .filter, .list { display: none; }
  .scroll { overflow: visible; } table { font-size: .85rem; }
  th, td { padding: .25rem .35rem; white-space: normal; } .cards tbody th { min-width: 0; }
  details:not(.plan, .glossary) { display: none; }
  .plan::details-content, .glossary::details-content { content-visibility: visible; }
  .card, figure, tr, .tile, .means { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .charts:not(.wide) { grid-template-columns: 1fr 1fr; } h2 { margin-top: 1.5rem; }
  .tiles { grid-template-columns: repeat(4, 1fr); } }
"""

FILTER = """
(() => {
  for (const box of document.querySelectorAll("input.filter")) {
    const rows = Array.from(document.getElementById(box.dataset.of).querySelectorAll("tbody tr"));
    const told = document.getElementById(box.dataset.of + "-count");
    const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
    box.addEventListener("input", () => {
      const wanted = box.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row, number) => {
        row.hidden = !names[number].includes(wanted);
        shown += row.hidden ? 0 : 1;
      });
      told.textContent = wanted ? shown + " of " + rows.length + " shown" : "";
    });
  }
})();
"""
