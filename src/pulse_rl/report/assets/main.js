const DATA = JSON.parse(document.getElementById("data").textContent);
const COSTS = DATA.costs;

if (DATA.run) drawRun(DATA.run);
if (DATA.study) drawStudy(DATA.study);
drawPlanner(DATA.scenario, COSTS);
