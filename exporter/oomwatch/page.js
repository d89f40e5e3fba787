// Fetches the page anew every few seconds and swaps its content, so that scroll position and open parts stay.
// Whatever goes wrong is shown loudly: a dead daemon must never leave a calm picture.
(() => {
  "use strict";
  const REFRESH = 5000;
  const GIVE_UP = 8000;
  const main = document.getElementById("main");
  const banner = document.getElementById("banner");
  let shownSince = Date.now();
  let title = document.title;

  const words = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  };

  const tellAge = () => {
    const age = document.getElementById("age");
    if (!age || !age.dataset.age) return;
    const seconds = Number(age.dataset.age) + (Date.now() - shownSince) / 1000;
    const old = seconds > Number(age.dataset.oldAfter);
    document.body.classList.toggle("old", old);
    age.querySelector("span").textContent = `${words(seconds)} old`;
    age.querySelector("b").hidden = !old;
  };

  const isBeingCopied = () => {
    const selection = document.getSelection();
    return selection && !selection.isCollapsed && main.contains(selection.anchorNode);
  };

  const swap = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    const fresh = next.getElementById("main");
    if (!fresh) throw new Error("the answer is not oomwatch's page");
    const open = new Map([...main.querySelectorAll("details[id]")].map((part) => [part.id, part.open]));
    const focused = main.contains(document.activeElement) ? document.activeElement.id : "";
    main.replaceChildren(...fresh.childNodes);
    for (const [id, state] of open) {
      const part = document.getElementById(id);
      if (part) part.open = state;
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    shownSince = Date.now();
    title = next.title;
    tellAge();
  };

  const fail = (reason) => {
    banner.textContent =
      `✖ oomwatch does not answer (${reason}). Below is how things were ${words((Date.now() - shownSince) / 1000)} ago, ` +
      "not how they are. Look whether it runs on the node.";
    banner.hidden = false;
    document.body.classList.add("dead");
    document.title = `✖ no answer · ${title}`;
  };

  const refresh = async () => {
    const control = new AbortController();
    const timer = setTimeout(() => control.abort(), GIVE_UP);
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", signal: control.signal });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      const text = await answer.text();
      if (!isBeingCopied()) swap(text);
      banner.hidden = true;
      document.body.classList.remove("dead");
      document.title = title;
    } catch (error) {
      fail(error.name === "AbortError" ? `nothing for ${GIVE_UP / 1000} s` : error.message);
    } finally {
      clearTimeout(timer);
      setTimeout(refresh, REFRESH);
    }
  };

  setInterval(tellAge, 1000);
  setTimeout(refresh, REFRESH);
})();
