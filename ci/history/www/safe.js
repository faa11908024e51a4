'use strict';

/* Text as HTML that shows it: what a benchmark, a machine or a parameter is called is never markup. */
function asv_text(value) {
    return String(value).replace(/[&<>"']/g, function (letter) {
        return '&#' + letter.charCodeAt(0) + ';';
    });
}

/* Relative change of speed between two values of a benchmark: negative is slower, whichever way its unit counts. */
function asv_faster(benchmark, before, after) {
    var ratio = $.asv.main_json.benchmarks[benchmark].higher_is_better ? after / before : before / after;
    return before && after ? ratio - 1 : 0;
}

/* The colour of a marked commit: red where the drawn lines become slower there, green where faster, grey where neither. */
function asv_colour(benchmark, graphs, x) {
    var total = 0;
    $.each(graphs, function (i, graph) {
        var points = $.grep(graph.data, function (point) { return point[1] !== null && point[1] !== undefined; });
        var mean = function (some) {
            var sum = 0;
            $.each(some, function (j, point) { sum += point[1]; });
            return some.length ? sum / some.length : 0;
        };
        var before = $.grep(points, function (point) { return point[0] < x; }).slice(-5);
        var after = $.grep(points, function (point) { return point[0] >= x; }).slice(0, 5);
        total += asv_faster(benchmark, mean(before), mean(after));
    });
    return total < -0.005 ? '#d00' : total > 0.005 ? '#1f8a46' : '#777';
}
