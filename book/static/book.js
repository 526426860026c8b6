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
