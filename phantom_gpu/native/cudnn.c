/* cuDNN's version, and its graph API as far as PyTorch's convolutions need it. What they set is not kept. They ask
   back what cuDNN computes: here one engine configuration, which has no knobs and no notes, and no workspace. */
#include <stdint.h>
#include <stdlib.h>

void phantom_unsized(const char *function);
void phantom_capability(int *major, int *minor);

/* Of cuDNN's cudnnBackendAttributeName_t. */
enum { ENGINEHEUR_RESULTS = 202, ENGINECFG_ENGINE = 300, EXECUTION_PLAN_WORKSPACE_SIZE = 402, ENGINE_GLOBAL_INDEX = 1301 };

/* Compute capabilities below 7.5 have had none since 9.11. */
size_t cudnnGetVersion(void) {
  int major, minor;
  phantom_capability(&major, &minor);
  return major * 10 + minor < 75 ? 91000 : 92000;
}
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int status) { return "phantom"; }

int cudnnBackendCreateDescriptor(int type, void **made) {
  static char descriptor;
  *made = &descriptor;
  return 0;
}

int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t room, int64_t *count, void *values) {
  int number = attribute == EXECUTION_PLAN_WORKSPACE_SIZE || attribute == ENGINE_GLOBAL_INDEX;
  if (number) *(int64_t *)values = 0;
  if (count) *count = number || attribute == ENGINEHEUR_RESULTS || attribute == ENGINECFG_ENGINE;
  if (attribute == EXECUTION_PLAN_WORKSPACE_SIZE) phantom_unsized("cudnnBackendGetAttribute");
  return 0;
}
