// llama.cpp, by the Node binding that ships it built. Speaks as bench/engines/adapter.py says.
// In: the model as a float32 GGUF file (bench.engines.gguf_float32), and the folder that the binding is installed in.
// What the library prints goes to stderr. One prompt after the other: of several sequences at once the binding gave
// now and then wrong tokens, others in every run.

import {createInterface} from "node:readline";
import {writeSync} from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [file, installed] = process.argv.slice(2);
const library = join(installed, "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama, getModuleVersion} = await import(pathToFileURL(library));

const POSITIONS = 2048, BATCH_TOKENS = 2048;
const say = (answer) => writeSync(1, JSON.stringify(answer) + "\n");

const llama = await getLlama({
    gpu: false, build: "never", maxThreads: 1, logger: (level, message) => console.error(level, message)
});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: POSITIONS, batchSize: BATCH_TOKENS, threads: 1});

async function generate(prompt, newTokens) {
    const sequence = context.getSequence();
    const made = [];
    // No end of generation ends an answer: its length is fixed.
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        made.push(token);
        if (made.length === newTokens) break;
    }
    await sequence.dispose();
    return made;
}

say({engine: `llama.cpp (node-llama-cpp ${await getModuleVersion()}, ${llama.llamaCppRelease.release})`});
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, new_tokens: newTokens} = JSON.parse(line);
    const tokens = [];
    for (const prompt of prompts) tokens.push(await generate(prompt, newTokens));
    say({tokens});
}
process.exit(0);
