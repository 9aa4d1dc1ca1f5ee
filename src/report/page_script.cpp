// The read-out under the pointer. Everything on the page is there without it.
#include <openssl/evp.h>

#include <algorithm>
#include <array>

#include "io/sha256.h"
#include "report/page_parts.h"

namespace halfstep::report {

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
