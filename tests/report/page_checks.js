// Functions that tests/report/page_checks.py calls in a page.

const checks = {
  // texts of elements that are shown
  *texts(skipped) {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
      if (!element.closest(skipped)) yield [walker.currentNode, element];
    }
  },

  isBroken(node, match) {
    const range = document.createRange();
    range.setStart(node, match.index);
    range.setEnd(node, match.index + match[0].length);
    const rects = [...range.getClientRects()].filter((each) => each.width > 0);
    return rects.some((each) => Math.abs(each.top - rects[0].top) > 4);
  },

  // numbers, with their units, that continue on another line; digits of a name or a digest are none
  brokenNumbers() {
    const unit = "(?:[ \\u00a0](?:bytes|[KMGT]iB|ms|us|ns|s)\\b|[%A-Za-z]{1,3}\\b)";
    const time = "\\d{4}-\\d\\d-\\d\\d(?:[T ][\\d:]+Z?)?";
    const number = new RegExp(`${time}|(?<![\\w.])[-+]?\\d[\\d.,:]*${unit}?(?!\\w)`, "g");
    const broken = [];
    for (const [node] of checks.texts("svg, code, script, style")) {
      for (const match of node.textContent.matchAll(number)) {
        if (checks.isBroken(node, match)) broken.push(match[0]);
      }
    }
    return broken;
  },

  // short words of tables and titles that continue on another line
  brokenWords() {
    const word = /(?<![\p{L}\p{N}_])[\p{L}\p{N}_]{2,14}(?![\p{L}\p{N}_])/gu;
    const broken = [];
    for (const [node, element] of checks.texts("svg, code, script, style")) {
      if (!element.closest("td, th, dt, summary, .tiles")) continue;
      for (const match of node.textContent.matchAll(word)) {
        if (checks.isBroken(node, match)) broken.push(match[0]);
      }
    }
    return broken;
  },

  // texts with less contrast than WCAG's level AA requires
  lowContrast() {
    const parse = (text) => {
      const parts = text.match(/[\d.]+/g).map(Number);
      return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
    };
    const over = (top, below) =>
      [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
    const luminance = (color) => {
      const [r, g, b] = color.slice(0, 3).map((each) => {
        const share = each / 255;
        return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
      const layers = [];
      for (let each = element; each; each = each.parentElement) {
        const color = parse(getComputedStyle(each).backgroundColor);
        if (color[3] > 0) layers.push(color);
        if (color[3] === 1) break;
      }
      return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
    };
    const low = new Set();
    for (const [node, element] of checks.texts("script, style, title")) {
      const style = getComputedStyle(element);
      const below = behind(element);
      const color = over(parse(element.closest("svg") ? style.fill : style.color), below);
      const both = [luminance(color), luminance(below)];
      const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
      const size = parseFloat(style.fontSize);
      const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (isLarge ? 3 : 4.5)) {
        low.add(`${element.tagName} ${ratio.toFixed(2)} ${node.textContent.trim().slice(0, 30)}`);
      }
    }
    return [...low];
  },

  headings() {
    const found = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")];
    return found.map((each) => Number(each.tagName[1]));
  },

  focusable() {
    const usable = "summary, input, button, a[href], [tabindex='0']";
    return [...document.querySelectorAll(usable)].filter((each) => each.checkVisibility()).length;
  },

  // place of the focused element, whether its focus can be seen, and whether it opens something
  focused() {
    const element = document.activeElement;
    if (!element || element === document.body) return null;
    const style = getComputedStyle(element);
    return {
      place: [...document.querySelectorAll("*")].indexOf(element),
      isVisible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
      opens: element.tagName === "SUMMARY" ? element.parentElement.open : null,
    };
  },

  openAll() {
    for (const each of document.querySelectorAll("details")) each.open = true;
  },

  modulesShown() {
    return [...document.querySelectorAll(".tree details")].filter((each) => !each.hidden).length;
  },

  // source lines that are shown, all and those with a text
  linesShown(text) {
    const rows = [...document.querySelectorAll(".own tr")].filter((each) => each.checkVisibility());
    return [rows.length, rows.filter((each) => each.textContent.includes(text)).length];
  },

  // milliseconds of a search, with the layout that follows
  search(text) {
    const input = document.getElementById("search");
    const began = performance.now();
    input.value = text;
    input.dispatchEvent(new Event("input"));
    document.body.getBoundingClientRect();
    return performance.now() - began;
  },

  secondsToShow() {
    document.body.getBoundingClientRect();
    return performance.getEntriesByType("navigation")[0].loadEventEnd / 1000;
  },
};
