"use strict";
(() => {
  // a table sorts by the column whose head is pressed; what has no number goes last
  const key = (row, column) => {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.value);
    return cell.dataset.value === undefined ? cell.textContent : number;
  };
  const compare = (one, two) => {
    if (typeof one === "number" && typeof two === "number") return one - two;
    return String(one).localeCompare(String(two), undefined, { numeric: true });
  };
  const missing = (value) => (typeof value === "number" && Number.isNaN(value)) || value === "-";
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => {
          const one = key(a, column), two = key(b, column);
          if (missing(one) || missing(two)) return missing(one) - missing(two);
          return (ascending ? 1 : -1) * compare(one, two);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  // buttons that copy the text of an element
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      const done = await copy(source.value ?? source.textContent);
      button.textContent = done ? "Copied" : "Not allowed here";
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  // values of a figure where one points
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  document.addEventListener("pointerover", (event) => {
    const text = event.target.dataset?.tip;
    if (text === undefined) return hide();
    tip.textContent = text;
    tip.hidden = false;
    const place = event.target.getBoundingClientRect();
    const left = Math.min(Math.max(8, place.left + place.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
  });
  addEventListener("scroll", hide, { passive: true });
})();
