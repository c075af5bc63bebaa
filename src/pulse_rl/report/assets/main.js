const DATA = JSON.parse(document.getElementById("data").textContent);

if (DATA.run) drawRun(DATA.run);
if (DATA.study) drawStudy(DATA.study);
drawPlanner(DATA.scenario, DATA.planned);
