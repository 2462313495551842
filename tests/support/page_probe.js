// What a page looks like, in numbers: an expression, whose value is an object. Lengths
// are CSS pixels. Each list names what is wrong, so all of them should be empty.
(() => {
  const slack = 0.75;
  const box = (element) => element.getBoundingClientRect();
  const name = (element) => {
    const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 60);
    return `${element.tagName.toLowerCase()} ${JSON.stringify(text)}`;
  };
  const shown = (element) => element.checkVisibility() && !element.closest(".hidden") &&
    box(element).width > 0;
  const overlap = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5;
  const parse = (color) => {
    const parts = color.match(/[\d.]+/g).map(Number);
    return parts.length < 4 ? [...parts, 1] : parts;
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] === 1) return color;
    }
    return [255, 255, 255, 1];
  };
  const contrast = (one, other) => {
    const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };

  const plots = [...document.querySelectorAll("svg.plot")];
  const outside = [], touching = [], pale = [], cut = [], wide = [];
  for (const plot of plots) {
    const frame = box(plot);
    const texts = [...plot.querySelectorAll("text")];
    for (const text of [...texts, ...plot.querySelectorAll("use")]) {
      const at = box(text);
      if (at.left < frame.left - slack || at.right > frame.right + slack ||
          at.top < frame.top - slack || at.bottom > frame.bottom + slack)
        outside.push(`${plot.getAttribute("aria-labelledby")}: ${name(text)}`);
    }
    texts.forEach((one, number) => {
      for (const other of texts.slice(number + 1))
        if (overlap(box(one), box(other)))
          touching.push(`${plot.getAttribute("aria-labelledby")}: ${name(one)} and ${name(other)}`);
    });
  }

  const blocks = [...document.querySelectorAll(
    "h1,h2,h3,h4,p,dt,dd,pre,summary,table,svg.plot,.badge")].filter(shown);
  blocks.forEach((one, number) => {
    for (const other of blocks.slice(number + 1))
      if (!one.contains(other) && !other.contains(one) && overlap(box(one), box(other)) &&
          !(one.closest(".scroll") || other.closest(".scroll")))
        touching.push(`${name(one)} and ${name(other)}`);
  });
  const cells = [...document.querySelectorAll("th,td,caption")].filter(shown);
  for (const element of [...blocks, ...cells]) {
    const style = getComputedStyle(element);
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth &&
        style.overflowX !== "auto" && style.display !== "inline" && element.tagName !== "svg")
      cut.push(name(element));
    if (!element.closest(".scroll") && box(element).right > document.documentElement.clientWidth + slack)
      wide.push(name(element));
  }
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((x) => x.nodeType === 3 && x.data.trim());
    if (!own || !element.checkVisibility() || element.closest("defs,title,desc,.hidden,.skip"))
      continue;
    if (["title", "desc"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const color = element.ownerSVGElement ? style.fill : style.color;
    const found = contrast(parse(color), behind(element.ownerSVGElement || element));
    if (found < 4.5) pale.push(`${name(element)}: ${color}, ${found.toFixed(2)}`);
  }

  const identifiers = [...document.querySelectorAll("[id]")].map((x) => x.id);
  const levels = [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")].map((x) => +x.tagName[1]);
  return {
    scrolls: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    plots: plots.length,
    smallest_text: Math.min(99, ...plots.flatMap((plot) =>
      [...plot.querySelectorAll("text")].map((x) =>
        parseFloat(getComputedStyle(x).fontSize) * box(plot).width / plot.viewBox.baseVal.width))),
    outside, touching, pale, cut, wide,
    twice: identifiers.filter((x, number) => identifiers.indexOf(x) !== number),
    dangling: [...document.querySelectorAll("[aria-labelledby],a[href],use")].flatMap((x) =>
      (x.getAttribute("aria-labelledby") || (x.getAttribute("href") || "").slice(1)).split(" "))
      .filter((x) => x && !document.getElementById(x)),
    nameless: [...document.querySelectorAll("svg")].filter((x) =>
      !(x.querySelector("title")?.textContent && x.querySelector("desc")?.textContent)).length +
      [...document.querySelectorAll("table")].filter((x) => !x.caption ||
      x.querySelector("th:not([scope])")).length,
    skipped_levels: levels.filter((level, number) => number && level > levels[number - 1] + 1),
    scripts: document.scripts.length + [...document.querySelectorAll("*")].filter((x) =>
      [...x.attributes].some((each) => each.name.startsWith("on"))).length,
    background: getComputedStyle(document.documentElement).backgroundColor,
    text: getComputedStyle(document.documentElement).color,
  };
})()
