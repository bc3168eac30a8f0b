-- Argo CD runs this in a sandbox that has no string library. A job that runs well is Healthy.
local function condition(kind)
  if obj.status.conditions == nil then
    return nil
  end
  for _, entry in ipairs(obj.status.conditions) do
    if entry.type == kind then
      return entry
    end
  end
  return nil
end

local function holds(kind)
  local found = condition(kind)
  return found ~= nil and found.status == "True"
end

local function told(kind)
  local found = condition(kind)
  if found == nil or found.message == nil then
    return ""
  end
  return found.message
end

if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not acted on this version yet" }
end
local rules = {
  { "Failed", "Degraded" },
  { "Stalled", "Degraded" },
  { "Complete", "Healthy" },
  { "Suspended", "Suspended" },
  { "Ready", "Healthy" },
}
for _, rule in ipairs(rules) do
  if holds(rule[1]) then
    return { status = rule[2], message = told(rule[1]) }
  end
end
return { status = "Progressing", message = told("Ready") }
