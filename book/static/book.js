/* Names for what the theme leaves without one: a screen reader then says what a button or a fold is for. */
document.addEventListener("DOMContentLoaded", () => {
  for (const fold of document.querySelectorAll("nav .has-children > details > summary")) {
    fold.setAttribute("aria-label", `Pages of ${fold.closest(".has-children").querySelector("a").textContent.trim()}`);
  }
  for (const button of document.querySelectorAll(".search-button-field")) button.removeAttribute("aria-label");
});

/* What is wider than the page scrolls inside itself, by keyboard too. */
new ResizeObserver(() => {
  for (const wide of document.querySelectorAll("article :is(table, mjx-container[display], .highlight-none pre)")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0; else wide.removeAttribute("tabindex");
  }
}).observe(document.documentElement);

/* The front page's picture runs once; the button runs it again. */
document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("run-again");
  button?.addEventListener("click", () => {
    const picture = document.getElementById("run");
    picture.classList.remove("run");
    void picture.offsetWidth;  // the style is computed without the animation, which then begins anew
    picture.classList.add("run");
  });
});
