const timeline = new Timeline(JSON.parse(document.getElementById("data").textContent));
document.body.dataset.ready = String(timeline.lanes.length);
