// Command reconcilers runs KubeRay's own reconcilers over the objects in a folder, a file KIND-NAME.json each, and
// writes them back. Pods are ready at once, and a Serve runs what it is given, which is left in serve-CLUSTER.json.
// `scripts/kuberay` builds it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/go-logr/logr"
	routev1 "github.com/openshift/api/route/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	configapi "github.com/ray-project/kuberay/ray-operator/apis/config/v1alpha1"
	rayv1 "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/batchscheduler"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils/dashboardclient"
	utiltypes "github.com/ray-project/kuberay/ray-operator/controllers/ray/utils/types"
)

const rounds = 25 // of all reconcilers: more than it takes until nothing changes

// kept are the lists of all that the reconcilers make and read again.
func kept() []client.ObjectList {
	return []client.ObjectList{
		&rayv1.RayServiceList{}, &rayv1.RayClusterList{}, &corev1.PodList{}, &corev1.ServiceList{}, &corev1.SecretList{},
		&corev1.ServiceAccountList{}, &rbacv1.RoleList{}, &rbacv1.RoleBindingList{},
	}
}

// world is the manager, the provider of clients and the recorder of events of the reconcilers.
type world struct {
	manager.Manager
	client client.Client
	scheme *runtime.Scheme
	folder string
}

func (w *world) GetClient() client.Client                        { return w.client }
func (w *world) GetScheme() *runtime.Scheme                      { return w.scheme }
func (w *world) GetEventRecorder(string) events.EventRecorder    { return w }
func (w *world) CheckProxyActorHealth(ctx context.Context) error { return nil }

func (w *world) Eventf(_, _ runtime.Object, kind, reason, _, note string, args ...any) {
	if kind == corev1.EventTypeWarning {
		fmt.Fprintf(os.Stderr, "%s: %s\n", reason, fmt.Sprintf(note, args...))
	}
}

func (w *world) GetDashboardClient(
	context.Context, manager.Manager,
) func(*rayv1.RayCluster, string) (dashboardclient.RayDashboardClientInterface, error) {
	return func(cluster *rayv1.RayCluster, _ string) (dashboardclient.RayDashboardClientInterface, error) {
		return &serve{path: filepath.Join(w.folder, "serve-"+cluster.Name+".json")}, nil
	}
}

func (w *world) GetHttpProxyClient(manager.Manager) func(string, string, string, int) utils.RayHttpProxyClientInterface {
	return func(string, string, string, int) utils.RayHttpProxyClientInterface { return w }
}

// serve runs every application that it was given.
type serve struct {
	dashboardclient.RayDashboardClientInterface
	path string
}

func (s *serve) UpdateDeployments(_ context.Context, config []byte) error {
	return os.WriteFile(s.path, config, 0o600)
}

func (s *serve) GetMultiApplicationStatus(context.Context) (map[string]*utiltypes.ServeApplicationStatus, error) {
	found := map[string]*utiltypes.ServeApplicationStatus{}
	text, err := os.ReadFile(s.path)
	if os.IsNotExist(err) {
		return found, nil
	}
	var config struct {
		Applications []struct{ Name string }
	}
	if err == nil {
		err = json.Unmarshal(text, &config)
	}
	for _, one := range config.Applications {
		found[one.Name] = &utiltypes.ServeApplicationStatus{Name: one.Name, Status: "RUNNING"}
	}
	return found, err
}

func (s *serve) GetServeDetails(context.Context) (*utiltypes.ServeDetails, error) {
	return &utiltypes.ServeDetails{}, nil
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	ctrl.SetLogger(logr.Discard())
	ctx := context.Background()
	w := &world{scheme: runtime.NewScheme(), folder: os.Args[1]}
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, rayv1.AddToScheme, gwv1.Install, routev1.Install,
	} {
		check(add(w.scheme))
	}
	w.client = w.load()
	scheduler, err := batchscheduler.NewSchedulerManager(ctx, configapi.Configuration{}, nil, w.client)
	check(err)
	services := ray.NewRayServiceReconciler(ctx, w, w)
	clusters := ray.NewReconciler(w, ray.RayClusterReconcilerOptions{BatchSchedulerManager: scheduler})
	for round := range rounds {
		failed := func(err error) { // what a controller tries again, as while a cluster has no head yet
			if round == rounds-1 {
				check(err)
			}
		}
		for _, one := range w.list(&rayv1.RayServiceList{}) {
			_, err := services.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(one)})
			failed(err)
		}
		for _, one := range w.list(&rayv1.RayClusterList{}) {
			_, err := clusters.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(one)})
			failed(err)
		}
		for _, one := range w.list(&corev1.PodList{}) {
			w.run(ctx, one.(*corev1.Pod))
		}
	}
	w.save()
}

// run has a pod ready, as a kubelet would in time.
func (w *world) run(ctx context.Context, pod *corev1.Pod) {
	if pod.Status.Phase == corev1.PodRunning {
		return
	}
	pod.Status.Phase, pod.Status.PodIP = corev1.PodRunning, "10.0.0.1"
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	check(w.client.Status().Update(ctx, pod))
}

func (w *world) list(list client.ObjectList) []client.Object {
	check(w.client.List(context.Background(), list))
	items, err := meta.ExtractList(list)
	check(err)
	found := make([]client.Object, 0, len(items))
	for _, one := range items {
		found = append(found, one.(client.Object))
	}
	return found
}

func (w *world) load() client.Client {
	decoder := serializer.NewCodecFactory(w.scheme).UniversalDeserializer()
	paths, err := filepath.Glob(filepath.Join(w.folder, "*-*.json"))
	check(err)
	builder := fake.NewClientBuilder().WithScheme(w.scheme)
	builder = builder.WithStatusSubresource(&rayv1.RayService{}, &rayv1.RayCluster{}, &corev1.Pod{})
	count := len(paths)
	for _, path := range paths {
		if strings.HasPrefix(filepath.Base(path), "serve-") {
			continue
		}
		text, err := os.ReadFile(path)
		check(err)
		object, _, err := decoder.Decode(text, nil, nil)
		check(err)
		builder = builder.WithRuntimeObjects(object)
	}
	// An API server gives each object an id, and the fake one does not.
	create := func(ctx context.Context, to client.WithWatch, object client.Object, options ...client.CreateOption) error {
		count++
		object.SetUID(types.UID(fmt.Sprint(count)))
		return to.Create(ctx, object, options...)
	}
	return builder.WithInterceptorFuncs(interceptor.Funcs{Create: create}).Build()
}

func (w *world) save() {
	old, err := filepath.Glob(filepath.Join(w.folder, "*-*.json"))
	check(err)
	for _, path := range old {
		if !strings.HasPrefix(filepath.Base(path), "serve-") {
			check(os.Remove(path))
		}
	}
	for _, list := range kept() {
		for _, object := range w.list(list) {
			kind, err := apiutil.GVKForObject(object, w.scheme)
			check(err)
			object.GetObjectKind().SetGroupVersionKind(kind)
			text, err := json.Marshal(object)
			check(err)
			name := fmt.Sprintf("%s-%s.json", strings.ToLower(kind.Kind), object.GetName())
			check(os.WriteFile(filepath.Join(w.folder, name), text, 0o600))
		}
	}
}
