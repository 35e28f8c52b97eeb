// Runs the checks of the JavaScript libraries against a running motet: node run.mjs URL KEY. A line of JSON for each.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, key] = process.argv.slice(2);
const BASE = "motet-demo", AGENT = "agent", JSON_ADAPTER = "json";
const QUESTION = "What is the capital of Peru?", ANSWER = "The capital of Peru is Lima.";
const TOOL_QUESTION = "What is the weather in Peru?", TOOL_ANSWER = "It is sunny in Peru.";
const RESULT = { sky: "sunny" };
const FACT = { type: "capital", query: "Peru", answer: "Lima" };
const messages = [{ role: "user", content: QUESTION }];

const fact = z.object({ type: z.string(), query: z.string(), answer: z.string() });
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const parameters = { type: "object", properties: { country: { type: "string" } }, required: ["country"] };
const weather = { type: "function", function: { name: "weather", description: "The weather in a country now.", parameters } };

const openai = {
  async text() {
    const answer = await client.chat.completions.create({ model: BASE, messages, temperature: 0 });
    assert.equal(answer.choices[0].message.content, ANSWER);
  },
  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model: BASE, messages, temperature: 0, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, ANSWER);
  },
  async tools() {
    const asked = [{ role: "user", content: TOOL_QUESTION }];
    const runner = client.chat.completions.stream({ model: AGENT, messages: asked, tools: [weather], temperature: 0 });
    const [call] = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["weather", { country: "Peru" }]);
  },
  async schema() {
    const response_format = zodResponseFormat(fact, "fact");
    const answer = await client.chat.completions.parse({ model: JSON_ADAPTER, messages, response_format, temperature: 0 });
    assert.deepEqual(answer.choices[0].message.parsed, FACT);
  },
  async responses() {
    assert.equal((await client.responses.create({ model: BASE, input: QUESTION, temperature: 0 })).output_text, ANSWER);
  },
  async responses_streamed() {
    const events = client.responses.stream({ model: BASE, input: QUESTION, temperature: 0 });
    assert.equal((await events.finalResponse()).output_text, ANSWER);
  },
  async responses_tools() {
    const tools = [{ type: "function", name: "weather", description: weather.function.description, parameters, strict: false }];
    const asked = { model: AGENT, tools, temperature: 0, store: false };
    const first = await client.responses.create({ ...asked, input: TOOL_QUESTION });
    const call = first.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: JSON.stringify(RESULT) };
    const input = [{ role: "user", content: TOOL_QUESTION }, ...first.output, output];
    assert.equal((await client.responses.create({ ...asked, input })).output_text, TOOL_ANSWER);
  },
  async stored() {
    const tools = [{ type: "function", name: "weather", description: weather.function.description, parameters, strict: false }];
    const asked = { model: AGENT, tools, temperature: 0 };
    const first = await client.responses.create({ ...asked, input: TOOL_QUESTION });
    const call = (await client.responses.retrieve(first.id)).output.find((item) => item.type === "function_call");
    const input = [{ type: "function_call_output", call_id: call.call_id, output: JSON.stringify(RESULT) }];
    const last = await client.responses.create({ ...asked, input, previous_response_id: first.id });
    assert.equal(last.output_text, TOOL_ANSWER);
    const kinds = [];
    for await (const item of client.responses.inputItems.list(last.id, { order: "asc", limit: 2 })) kinds.push(item.type);
    assert.deepEqual(kinds, ["message", "function_call", "function_call_output"]);
    await client.responses.delete(last.id);
    await assert.rejects(client.responses.retrieve(last.id), OpenAI.NotFoundError);
  },
  async responses_schema() {
    const text = { format: zodTextFormat(fact, "fact") };
    const answer = await client.responses.parse({ model: JSON_ADAPTER, input: QUESTION, text, temperature: 0 });
    assert.deepEqual(answer.output_parsed, FACT);
  },
  async embeddings() {
    const found = await client.embeddings.create({ model: BASE, input: [QUESTION, "hello"] });
    assert.equal(found.data.length, 2);
  },
};

const compatible = createOpenAICompatible({ name: "motet", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true });
const responses = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const weatherTool = tool({
  description: "The weather in a country now.",
  inputSchema: z.object({ country: z.string() }),
  execute: async () => RESULT,
});

const ai = {
  async text() {
    const { text } = await generateText({ model: compatible(BASE), prompt: QUESTION, temperature: 0, maxRetries: 0 });
    assert.equal(text, ANSWER);
  },
  async stream() {
    const { textStream } = streamText({ model: compatible(BASE), prompt: QUESTION, temperature: 0, maxRetries: 0 });
    let text = "";
    for await (const part of textStream) text += part;
    assert.equal(text, ANSWER);
  },
  async tools() {
    const found = await generateText({
      model: compatible(AGENT), prompt: TOOL_QUESTION, temperature: 0, maxRetries: 0,
      tools: { weather: weatherTool }, stopWhen: stepCountIs(2),
    });
    assert.equal(found.text, TOOL_ANSWER);
  },
  async schema() {
    const { object } = await generateObject({ model: compatible(JSON_ADAPTER), schema: fact, prompt: QUESTION, temperature: 0, maxRetries: 0 });
    assert.deepEqual(object, FACT);
  },
  async responses() {
    const { text } = await generateText({ model: responses(BASE), prompt: QUESTION, temperature: 0, maxRetries: 0 });
    assert.equal(text, ANSWER);
  },
  async responses_streamed() {
    const { textStream } = streamText({ model: responses(BASE), prompt: QUESTION, temperature: 0, maxRetries: 0 });
    let text = "";
    for await (const part of textStream) text += part;
    assert.equal(text, ANSWER);
  },
  async responses_tools() {
    const found = await generateText({
      model: responses(AGENT), prompt: TOOL_QUESTION, temperature: 0, maxRetries: 0,
      tools: { weather: weatherTool }, stopWhen: stepCountIs(2), providerOptions: { openai: { store: false } },
    });
    assert.equal(found.text, TOOL_ANSWER);
  },
  async stored() {
    const asked = { model: responses(BASE), temperature: 0, maxRetries: 0 };
    const first = await generateText({ ...asked, prompt: QUESTION });
    const conversation = [...messages, ...first.response.messages, ...messages];
    const second = await generateText({ ...asked, messages: conversation });
    assert.match(JSON.stringify(second.request.body), /item_reference/);
    const unstored = { openai: { store: false } };
    assert.equal(second.text, (await generateText({ ...asked, messages: conversation, providerOptions: unstored })).text);
  },
  async responses_schema() {
    const asked = { model: responses(JSON_ADAPTER), schema: fact, prompt: QUESTION, temperature: 0, maxRetries: 0 };
    assert.deepEqual((await generateObject(asked)).object, FACT);
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: compatible.textEmbeddingModel(BASE), values: [QUESTION, "hello"], maxRetries: 0 });
    assert.equal(embeddings.length, 2);
  },
};

for (const [library, checks] of [["openai", openai], ["ai", ai]]) {
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${library}/package.json`, import.meta.url)));
  for (const [check, run] of Object.entries(checks)) {
    let wrong = "";
    try {
      await run();
    } catch (error) {
      wrong = `${error.name}: ${error.message}`.slice(0, 500);
    }
    console.log(JSON.stringify({ library: `${library} (JavaScript)`, version, check, wrong }));
  }
}
