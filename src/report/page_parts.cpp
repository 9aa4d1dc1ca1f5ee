// The page's style. Colours 1 to 6 are apart for every common colour-blindness, by lightness as well as by
// hue, in the light and in the dark; 7 is grey, 8 is 1 again with less weight.
#include "report/page_parts.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>

#include "io/sha256.h"

namespace halfstep::report {

const std::string_view kStyle = R"css(
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1d2126; --quiet: #5c6570; --rule: #e2e3df; --grid: #e9eae6;
  --c1: #0a62a8; --c2: #d9601a; --c3: #00806a; --c4: #8a3f8f; --c5: #c79a00; --c6: #4fa3dc; --c7: #8a929b; --c8: #7a4a22;
  --good: #1a7f47; --fair: #96690a; --bad: #c4262e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1b1f23; --ink: #e4e7ea; --quiet: #9aa4ae; --rule: #30363c; --grid: #282d33;
    --c1: #5aaef0; --c2: #f2935a; --c3: #35c0a2; --c4: #cf8fd4; --c5: #e3bf4a; --c6: #a9d6f7; --c7: #8b949e; --c8: #c69a72;
    --good: #57c785; --fair: #e0b04c; --bad: #ff7b78;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 56px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; font-weight: 650; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 44px 0 14px; padding-top: 14px; border-top: 1px solid var(--rule); font-weight: 650; }
h3 { font-size: .95rem; margin: 0; font-weight: 650; }
section > h3 { margin: 26px 0 8px; }
p { margin: .5em 0; }
.quiet, .note, .unit { color: var(--quiet); }
.unit { font-weight: 400; }
.note { font-size: .85rem; margin: 8px 0 0; }
.headline { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; }
.outcome { font-size: .85rem; font-weight: 650; padding: 1px 10px; border-radius: 99px; border: 1.5px solid currentColor; }
.outcome.good { color: var(--good); } .outcome.fair { color: var(--fair); } .outcome.bad { color: var(--bad); }
.outcome.open { color: var(--quiet); }
.trained { color: var(--quiet); margin: 6px 0 0; overflow-wrap: anywhere; }
.verdict { font-size: 1.08rem; max-width: 76ch; margin: 14px 0 0; }
.warning { border-left: 3px solid var(--bad); padding: 2px 0 2px 12px; max-width: 90ch; }
.figures { display: flex; flex-wrap: wrap; gap: 1px; margin: 24px 0 0; padding: 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 8px; overflow: hidden; }
.figures div { background: var(--card); padding: 12px 16px; flex: 1 1 148px; }
.figures dt { font-size: .8rem; color: var(--quiet); }
.figures dd { margin: 0; font-size: 1.25rem; font-weight: 600; line-height: 1.3; white-space: nowrap; }
.figures small { display: block; font-size: .8rem; font-weight: 400; color: var(--quiet); }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin: 24px 0 0; }
.plot, .panel { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px 12px;
  min-width: 0; break-inside: avoid; display: flex; flex-direction: column; }
.compared { margin-top: 24px; }
.comparing:has(> .wide:nth-child(2)) > :last-child:nth-child(odd), .comparing:not(:has(> .wide:nth-child(2))) > :last-child:nth-child(even),
.training > :last-child:nth-child(even), .even > :first-child:nth-last-child(odd), .wide { grid-column: 1 / -1; }
.plot figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 18px; min-height: 1.5em; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 16px; margin: 0; padding: 0; font-size: .82rem; color: var(--quiet); }
.legend li { display: flex; align-items: center; gap: 6px; white-space: nowrap; }
.legend li[hidden] { display: none; }
.legend output { color: var(--ink); font-weight: 600; }
.legend output:empty { display: none; }
.key { width: 16px; height: 0; border-top: 2.5px solid var(--c); border-radius: 2px; flex: none; }
.key.faint { opacity: .4; }
.key.dots { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c); }
.key.area { width: 11px; height: 11px; border: 0; background: var(--c); }
.key.mark, .key.bad { width: 0; height: 11px; border: 0; border-left: 2.5px solid var(--bad); }
.key.bad { width: 11px; border-left: 0; background: var(--bad); height: 5px; border-radius: 0; }
.key.resumed { width: 0; height: 12px; border: 0; border-left: 1.5px dashed var(--quiet); }
.frame { display: grid; grid-template-columns: 46px minmax(0, 1fr); grid-template-rows: minmax(190px, 1fr) 22px; flex: 1; margin-top: 10px;
  font-size: .78rem; color: var(--quiet); }
.wide .frame { grid-template-rows: 320px 22px; }
.y, .x, .box { position: relative; }
.y span { position: absolute; right: 8px; transform: translateY(50%); line-height: 1; white-space: nowrap; }
.y sup { font-size: .8em; line-height: 0; }
.corner { text-align: right; padding: 5px 8px 0 0; line-height: 1.2; }
.x span { position: absolute; top: 5px; transform: translateX(-50%); line-height: 1.2; white-space: nowrap; }
.x span.begin { transform: none; } .x span.end { transform: translateX(-100%); }
.box { border-bottom: 1px solid var(--quiet); }
.box svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; overflow: visible; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--quiet); pointer-events: none; }
svg path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
svg .grid { stroke: var(--grid); stroke-width: 1; stroke-linecap: butt; }
svg .line { stroke: var(--c); stroke-width: 1.8; }
svg .faint { stroke: var(--c); stroke-width: 1; opacity: .38; }
svg .dots { stroke: var(--c); stroke-width: 8; }
svg .area { fill: var(--c); stroke: none; }
svg .mark, svg .bad { stroke: var(--bad); fill: var(--bad); stroke-width: 1.6; stroke-linejoin: miter; }
svg .resumed { stroke: var(--quiet); stroke-width: 1.2; stroke-dasharray: 3 4; stroke-linecap: butt; }
.c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); } .c8 { --c: var(--c8); }
.none { color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; }
.bars table { width: 100%; }
th, td { text-align: left; padding: 5px 24px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; max-width: 64ch; }
td:last-child:not(.number) { min-width: 22ch; }
th { font-weight: 600; color: var(--quiet); font-size: .8rem; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.bar { display: block; height: 9px; min-width: 1px; background: var(--c); border-radius: 2px;
  -webkit-print-color-adjust: exact; print-color-adjust: exact; }
.bars td:nth-child(2) { width: 45%; min-width: 90px; vertical-align: middle; }
.nowrap { white-space: nowrap; }
.swatch { display: inline-block; width: 10px; height: 10px; margin-right: 8px; background: var(--c);
  -webkit-print-color-adjust: exact; print-color-adjust: exact; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
  "Liberation Mono", "DejaVu Sans Mono", monospace; tab-size: 4; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); gap: 12px; }
.sample h3 { margin-bottom: 6px; }
.sample b { font-weight: 600; color: var(--c1); }
.pairs { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 40px; }
details { margin: 10px 0 0; }
summary { cursor: pointer; color: var(--quiet); font-size: .88rem; }
.configuration { columns: 3 300px; column-gap: 32px; }
footer { margin-top: 40px; font-size: .82rem; color: var(--quiet); }
@media (max-width: 820px) {
  main { padding: 20px 14px 40px; }
  .plots, .pairs { grid-template-columns: minmax(0, 1fr); gap: 12px; }
  .pairs { gap: 0; }
  .wide .frame { grid-template-rows: 240px 22px; }
  .plot, .panel { padding: 12px 12px 10px; }
  .figures div { padding: 10px 12px; }
  th, td { padding-right: 14px; }
  h1 { font-size: 1.45rem; }
  .verdict { font-size: 1rem; }
}
@media print {
  :root {
    --paper: #fff; --card: #fff; --ink: #000; --quiet: #444; --rule: #ccc; --grid: #e4e4e4;
    --c1: #0a62a8; --c2: #d9601a; --c3: #00806a; --c4: #8a3f8f; --c5: #c79a00; --c6: #4fa3dc; --c7: #8a929b; --c8: #7a4a22;
    --good: #1a7f47; --fair: #96690a; --bad: #c4262e;
  }
  body { font-size: 11px; }
  main { max-width: none; padding: 0; }
  .plots { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .scroll { overflow: visible; }
}
)css";

const std::string_view kScript = R"js(
"use strict";
const number = value => value === null ? "not finite" :
  Math.abs(value) >= 1e4 && Math.abs(value) < 1e9 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
for (const figure of document.querySelectorAll("figure.plot")) {
  const box = figure.querySelector(".box"), data = figure.querySelector("script");
  if (!box || !data) continue;
  const { series } = JSON.parse(data.textContent);
  const outputs = figure.querySelectorAll("output"), unit = figure.querySelector("h3");
  const frame = figure.querySelector(".frame").dataset, first = Number(frame.first), last = Number(frame.last);
  const cursor = document.createElement("div"), at = document.createElement("span");
  cursor.className = "cursor";
  at.className = "unit";
  const show = event => {
    const area = box.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - area.left) / area.width));
    const step = Math.round(first + share * (last - first));
    cursor.style.left = 100 * share + "%";
    box.append(cursor);
    at.textContent = " · step " + step.toLocaleString("en");
    unit.append(at);
    series.forEach((one, i) => {
      // The last column that begins at this step or before it; the nearer of its neighbours if it ends before.
      let k = one.steps.findLastIndex(begin => begin <= step);
      const ends = one.to || one.steps;
      if (k < 0 || (k + 1 < ends.length && step - ends[k] > one.steps[k + 1] - step)) ++k;
      const least = number((one.least || one.value || one.mean)[k]), greatest = one.greatest ? number(one.greatest[k]) : least;
      outputs[i].textContent = least === greatest ? least : least + " to " + greatest;
    });
  };
  const hide = () => { cursor.remove(); at.remove(); outputs.forEach(output => { output.textContent = ""; }); };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", hide);
}
)js";

std::string script_hash() {
  const std::string hex = files::sha256_of(kScript);
  std::array<unsigned char, 32> hash{};
  for (size_t i = 0; i < hash.size(); ++i)
    hash[i] = static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  std::array<unsigned char, 45> text{};  // 44 letters, and the zero that OpenSSL puts behind them
  const int letters = EVP_EncodeBlock(text.data(), hash.data(), static_cast<int>(hash.size()));
  return {text.begin(), text.begin() + letters};
}

}  // namespace halfstep::report
