'use strict';

/* Text as HTML that shows it: what a benchmark, a machine or a parameter is called is never markup. */
function asv_text(value) {
    return String(value).replace(/[&<>"']/g, function (letter) {
        return '&#' + letter.charCodeAt(0) + ';';
    });
}
